"""Mixtures of experts in transformers: their keys of config.json, and their tensors."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.families.huggingface import (
    InMemory,
    Weight,
    moved,
    require_fields,
    require_sizes,
    require_values,
    same,
    same_weight_and_bias,
)
from megatron_zpp.models.decoder import DecoderConfig
from megatron_zpp.models.moe import MoEConfig

GATED = ("gate_proj", "up_proj", "down_proj")
# Fields of ``MoEConfig`` that every family writes, or that only training needs.
WRITTEN = ("num_experts", "ffn_hidden_size", "router_topk", "aux_loss_coeff", "z_loss_coeff", "min_capacity")
BIAS_UPDATE_RATE = 1e-3  # Megatron's default; config.json has none


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in config.json and among the tensors of a layer."""

    number: str  # the key with the number of experts
    width: str  # the key with the width of one
    module: str = "mlp"
    projections: tuple[str, str, str] = GATED  # gate, up and down
    pre_softmax: str | None = None  # the key that is false where scores are softmax over all experts; None: never
    fields: Mapping[str, Any] = field(default_factory=dict)  # {field of MoEConfig: its only value}
    keys: Mapping[str, str] = field(default_factory=dict)  # {key of config.json: field with the same value}
    balancing: str | None = "router_aux_loss_coef"
    has_groups: bool = False  # n_group and topk_group
    first: str | None = None  # the key with the number of blocks before those with experts
    bias: str | None = None  # the tensor with biases for the choice
    shared: str | None = None  # the module of the shared expert
    shared_number: str | None = None  # the key with its width, as a multiple of an expert's

    def write(self, model_type: str, config: DecoderConfig) -> dict[str, Any]:
        if (moe := config.moe) is None:
            raise ValueError(f"{model_type} does not have layers without experts")
        written = [*WRITTEN, *self.keys.values(), *(["router_pre_softmax"] if self.pre_softmax else [])]
        written += ["router_num_groups", "router_group_topk"] if self.has_groups else []
        written += ["shared_expert_size"] if self.shared else []
        written += ["bias_update_rate"] if self.bias and moe.bias_update_rate else []
        required: dict[str, tuple[Any, ...]] = {name: (value,) for name, value in self.fields.items()}
        required["load_balancing"] = ("aux_loss", "seq_aux_loss", "all_layers_aux_loss")
        require_fields(moe, model_type, required, written)
        values: dict[str, Any] = {
            self.number: moe.num_experts,
            self.width: moe.ffn_hidden_size,
            "num_experts_per_tok": moe.router_topk,
            **{key: getattr(moe, name) for key, name in self.keys.items()},
        }
        if self.balancing:  # there it is a mean over layers, and counts each of a token's choices whole
            layers = 1 if moe.load_balancing == "all_layers_aux_loss" else config.num_layers
            values[self.balancing] = moe.aux_loss_coeff * layers / moe.router_topk
        if self.pre_softmax:
            values[self.pre_softmax] = not moe.router_pre_softmax
        if self.has_groups:
            groups, best = moe.router_num_groups or 1, moe.router_group_topk or 1
            if groups > 1 and moe.router_topk != 2 * best:
                raise ValueError(f"{model_type} chooses groups by 2 experts each, and not {moe.router_topk // best}")
            values |= {"n_group": groups, "topk_group": best}
        if self.first:
            values[self.first] = first = config.layers_with_experts[0]
            if list(config.layers_with_experts) != list(range(first, config.num_layers)):
                raise ValueError(f"{model_type} does not have moe_layer_freq {config.moe_layer_freq}")
        if self.shared and moe.shared_expert_size is None:
            raise ValueError(f"{model_type} does not have layers without a shared expert")
        if self.shared_number and moe.shared_expert_size:
            values[self.shared_number], rest = divmod(moe.shared_expert_size, moe.ffn_hidden_size)
            if rest:
                raise ValueError(f"{model_type} has shared experts as wide as the others, not {moe.shared_expert_size}")
        return values

    def read(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        # Version 5's key in every family.
        number = "num_local_experts" if "num_local_experts" in hf else self.number
        require_sizes(hf, number, self.width, "num_experts_per_tok")
        topk, layers = hf["num_experts_per_tok"], hf["num_hidden_layers"]
        values: dict[str, Any] = {**self.fields, **{name: hf[key] for key, name in self.keys.items()}}
        if self.pre_softmax:
            values["router_pre_softmax"] = not hf[self.pre_softmax]
        if self.balancing:
            values["aux_loss_coeff"] = hf[self.balancing] * topk / layers
        if self.has_groups and (hf["n_group"] or 1) > 1:
            require_values({"num_experts_per_tok": topk}, {"num_experts_per_tok": (2 * hf["topk_group"],)})
            values |= {"router_num_groups": hf["n_group"], "router_group_topk": hf["topk_group"]}
        if self.bias:
            values["bias_update_rate"] = BIAS_UPDATE_RATE
        if self.shared_number:
            values["shared_expert_size"] = hf[self.shared_number] * hf[self.width]
        first = hf[self.first] if self.first else 0
        frequency = {"moe_layer_freq": f"[0]*{first}+[1]*{layers - first}"} if first else {}
        return {"moe": MoEConfig(hf[number], hf[self.width], router_topk=topk, **values), **frequency}

    def weights(self, ours: str, theirs: str, moe: MoEConfig) -> Iterator[Weight]:
        """Pair one layer's experts, whose rows we concatenate."""

        def split(x: Tensor) -> tuple[Tensor, ...]:
            return x.unflatten(0, (moe.num_experts, -1)).unbind(0)

        yield same(f"{ours}.router.weight", f"{theirs}.gate.weight")
        for layer, name in zip(("fc1_gate", "fc1_up", "fc2"), self._tensors(theirs, moe), strict=True):
            yield Weight((f"{ours}.experts.linear_{layer}.weight",), name, split, lambda *x: (torch.cat(x),))
        if self.bias:
            yield same(f"{ours}.expert_bias", f"{theirs}.{self.bias}")
        for layer, part in zip(("fc1_gate", "fc1_up", "fc2"), GATED if self.shared else (), strict=False):
            yield same(f"{ours}.shared_expert.linear_{layer}.weight", f"{theirs}.{self.shared}.{part}.weight")
        if moe.shared_expert_gate:
            yield same(f"{ours}.shared_gate.weight", f"{theirs}.{self.shared}_gate.weight")

    def in_memory(self, layer: str, moe: MoEConfig) -> Iterator[InMemory]:
        """Yield version 5's parameters of a layer: experts [E, out, in], with gate and up concatenated."""

        def gates_and_ups(*experts: Tensor) -> Tensor:
            gates, ups = experts[: moe.num_experts], experts[moe.num_experts :]
            return torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)])

        theirs = f"{layer}.{self.module}"
        gates, ups, downs = self._tensors(theirs, moe)
        for name in ("gate.weight", *((self.bias,) if self.bias else ())):
            yield InMemory(f"{layer}.mlp.{name}", (f"{theirs}.{name}",), lambda x: x)
        yield InMemory(f"{layer}.mlp.experts.gate_up_proj", gates + ups, gates_and_ups)
        yield InMemory(f"{layer}.mlp.experts.down_proj", downs, lambda *experts: torch.stack(experts))

    def _tensors(self, theirs: str, moe: MoEConfig) -> list[tuple[str, ...]]:
        """List the names of all gates, ups and downs."""
        experts = range(moe.num_experts)
        return [tuple(f"{theirs}.experts.{i}.{name}.weight" for i in experts) for name in self.projections]


class GptOssExperts(Experts):
    """Experts whose tensors have a first dimension E, no ``_proj.weight``, and gates and ups side by side in pairs."""

    def weights(self, ours: str, theirs: str, moe: MoEConfig) -> Iterator[Weight]:
        def stacked(x: Tensor) -> Tensor:  # [E * out, in] -> [E, in, out]; biases [E * out] -> [E, out]
            return x.unflatten(0, (moe.num_experts, -1)).movedim(1, -1)

        def flat(x: Tensor) -> Tensor:
            return x.movedim(-1, 1).flatten(0, 1)

        def in_pairs(gate: Tensor, up: Tensor) -> tuple[Tensor]:
            return (torch.stack([stacked(gate), stacked(up)], dim=-1).flatten(-2),)

        def gate_and_up(x: Tensor) -> tuple[Tensor, ...]:
            return tuple(map(flat, x.unflatten(-1, (-1, 2)).unbind(-1)))

        yield from same_weight_and_bias(f"{ours}.router", f"{theirs}.router")
        for kind, ending in ("weight", ""), ("bias", "_bias"):
            gates_ups = tuple(f"{ours}.experts.linear_{layer}.{kind}" for layer in ("fc1_gate", "fc1_up"))
            yield Weight(gates_ups, (f"{theirs}.experts.gate_up_proj{ending}",), in_pairs, gate_and_up)
            yield moved(f"{ours}.experts.linear_fc2.{kind}", f"{theirs}.experts.down_proj{ending}", stacked, flat)

    def in_memory(self, layer: str, moe: MoEConfig) -> Iterator[InMemory]:
        return iter(())  # the same in files
