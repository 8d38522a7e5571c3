"""A mixture of experts in place of an MLP: a router sends each token to k of E experts, and sums their outputs.

Shazeer et al. (arXiv 1701.06538), with the balancing loss of Switch Transformers (Fedus et al., arXiv 2101.03961) and
the z-loss of ST-MoE (Zoph et al., arXiv 2202.08906). T tokens are B * S; experts are gated or plain MLPs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_zpp.fields import check_fields

from .decoder_flags import ExpertFlags
from .mlp import Activation

TINY = 1e-20  # added to a sum of scores, which may all underflow, as in Megatron
MOST_PADDING = 2  # times T * k rows, to which experts that are divided are padded at most
LOAD_BALANCING = ("aux_loss", "seq_aux_loss", "all_layers_aux_loss", "sinkhorn")


@dataclass(frozen=True)
class MoEConfig(ExpertFlags):
    """The experts of one layer, and how tokens come to them: the fields of flags, and what is computed from flags."""

    num_experts: int
    ffn_hidden_size: int  # per expert
    bias_update_rate: float | None = None  # step of the load-balancing biases; None: no biases

    def __post_init__(self) -> None:
        if not 1 <= self.router_topk <= self.num_experts:
            raise ValueError(f"router_topk is {self.router_topk}; a token goes to 1 to {self.num_experts} experts")
        if self.router_pre_softmax and self.score_function == "sigmoid":
            raise ValueError("router_pre_softmax requires score_function softmax, not sigmoid")
        if self.load_balancing not in LOAD_BALANCING:
            raise ValueError(f"load_balancing is {self.load_balancing!r}; choose from {', '.join(LOAD_BALANCING)}")
        check_fields(self, group=ExpertFlags)
        if self.shared_expert_size is None and (self.residual or self.shared_expert_gate):
            raise ValueError("residual and shared_expert_gate weigh the shared expert: give shared_expert_size")
        if self.residual and self.shared_expert_gate:
            raise ValueError("residual and shared_expert_gate both weigh the shared expert: give one")
        groups, best = self.router_num_groups, self.router_group_topk
        if (groups is None) != (best is None):
            raise ValueError("router_num_groups and router_group_topk need each other: give both")
        if groups is not None and best is not None:
            if self.num_experts % groups or not 1 <= best <= groups or self.router_topk % best:
                raise ValueError(
                    f"router_num_groups {groups} must divide num_experts {self.num_experts}, and router_group_topk "
                    f"{best} be at most that and divide router_topk {self.router_topk}"
                )
            if self.router_topk // best > self.num_experts // groups:
                raise ValueError(f"router_topk {self.router_topk} is more than router_group_topk {best} groups have")
        if self.bias_update_rate is not None and self.score_function == "softmax":
            raise ValueError("bias_update_rate moves biases of sigmoid scores, and score_function is softmax")


class Routing(NamedTuple):
    """The experts of each token."""

    experts: Tensor  # int64 [T, k]
    weights: Tensor  # fp32 [T, k]: of what the experts make
    scores: Tensor  # fp32 [T, E], rows of which add up to 1: of all experts, for the balancing loss
    load: Tensor  # int64 [E]: tokens that chose each expert


class Routed(NamedTuple):
    """A layer's losses and statistics of a micro-batch."""

    balancing_loss: Tensor  # coefficients included
    z_loss: Tensor
    load: Tensor  # int64 [E]: tokens that chose each expert, over all parts of the samples
    dropped: Tensor  # choices that an expert had no room for, of T * k
    counted: Tensor  # int64 [E]: choices as balancing counts them, without bias and groups
    mean_scores: Tensor  # fp32 [E], over this rank's tokens
    entropy: Tensor  # entropy of a token's scores, mean over tokens; log E for a uniform router


def route(logits: Tensor, config: MoEConfig, bias: Tensor | None = None, training: bool = True) -> Routing:
    """Choose each token's experts by the router's ``logits``, fp32 [T, E].

    bias: fp32 [E], added to the scores for the choice alone (Wang et al., arXiv 2408.15664). training: whether
    Sinkhorn routing balances the choice, as it does in training alone.
    """
    if config.load_balancing == "sinkhorn":
        scores = logits.softmax(dim=-1)
        every = logits.sigmoid() if config.router_topk == 1 else scores
        experts = (sinkhorn(logits.detach()) if training else every).topk(config.router_topk, dim=-1).indices
        return Routing(experts, every.gather(-1, experts), scores, count_each(experts.flatten(), config.num_experts))
    if config.score_function == "sigmoid":
        every = logits.sigmoid()
        scores = every / (every.sum(dim=-1, keepdim=True) + TINY)
    else:
        every = scores = logits.softmax(dim=-1)
    choice = every if bias is None else every + bias
    if config.score_function == "softmax" and not config.router_pre_softmax and config.router_num_groups is not None:
        choice = logits  # Megatron adds up a group's logits
    if config.router_num_groups is not None and config.router_group_topk is not None:
        choice = in_best_groups(choice, config.router_num_groups, config.router_group_topk, config.router_topk)
    experts = choice.topk(config.router_topk, dim=-1).indices
    weights = every.gather(-1, experts)
    if config.score_function == "softmax" and not config.router_pre_softmax:
        weights = logits.gather(-1, experts).softmax(dim=-1)
    elif config.score_function == "sigmoid" and config.router_topk > 1:  # a single one stays as it is
        weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
    load = count_each(experts.flatten(), config.num_experts)
    return Routing(experts, weights * config.topk_scaling_factor, scores, load)


def count_each(indices: Tensor, number: int) -> Tensor:
    """Count how often ``indices`` int64 [n] has each of 0 to ``number`` - 1; bincount's host would wait for a GPU."""
    return indices.new_zeros(number).scatter_add_(0, indices, torch.ones_like(indices))


def in_best_groups(scores: Tensor, num_groups: int, group_topk: int, topk: int) -> Tensor:
    """Set ``scores`` [T, E] to -inf outside each token's best groups (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""
    groups = scores.unflatten(-1, (num_groups, -1))  # [T, groups, E / groups]
    best = groups.topk(topk // group_topk, dim=-1).values.sum(dim=-1).topk(group_topk, dim=-1).indices
    outside = torch.ones(groups.shape[:2], dtype=torch.bool, device=scores.device).scatter(-1, best, False)
    return groups.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(-2)


def sinkhorn(logits: Tensor, tolerance: float = 1e-4, most_rounds: int = 100) -> Tensor:
    """Scale rows and columns of exp(``logits``), fp32 [T, E], until each token and each expert has an even share.

    The choice of S-BASE (Clark et al., arXiv 2202.01169), which stops as Megatron-LM's does.
    """
    tokens, num_experts = logits.shape
    kernel = (logits - logits.amax(dim=-1, keepdim=True)).exp()
    rows, columns = kernel.new_ones(tokens), kernel.new_ones(num_experts)
    for _ in range(most_rounds):
        rows = 1 / (tokens * (kernel @ columns + 1e-8))
        previous, columns = columns, 1 / (num_experts * (rows @ kernel + 1e-8))
        if not (columns - previous).abs().mean() > tolerance:
            break
    return rows.unsqueeze(-1) * kernel * columns


def balancing_loss(scores: Tensor, load: Tensor) -> Tensor:
    """E * sum over experts of (share of the choices) * (mean score): 1 where both are even (Switch, equation 4).

    scores: fp32 [..., T, E]. load: int64 [..., E]. Returns the mean over the leading dimensions.
    """
    tokens, num_experts = scores.shape[-2:]
    share = load.float() / load.sum(dim=-1, keepdim=True)
    return num_experts * (share * scores.sum(dim=-2) / max(tokens, 1)).sum(dim=-1).mean()


def z_loss(logits: Tensor) -> Tensor:
    """Mean square of the log of the softmax's denominator (ST-MoE, equation 5): keeps logits small."""
    return logits.logsumexp(dim=-1).square().mean()


class GroupedLinear(nn.Module):
    """E linear layers, each of which has a run of the rows.

    ``weight`` [E * out, in] has the layers one below the other, so that any number of ranks shards it evenly, and
    ``bias`` [E * out].
    """

    def __init__(self, num_groups: int, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(num_groups * out_features, in_features))
        self.bias = nn.Parameter(torch.empty(num_groups * out_features)) if bias else None

    def forward(self, x: Tensor, stops: Tensor) -> Tensor:
        """``x`` [R, in], ``stops`` int32 [E], the row after each layer's last -> [R, out]."""
        weight = _local(self.weight).unflatten(0, (-1, self.out_features))  # [E, out, in]
        counts = stops.diff(prepend=stops.new_zeros(1))
        if x.dtype == torch.bfloat16:  # torch's grouped product takes bf16 on every device
            y = F.grouped_mm(x, weight.transpose(1, 2), offs=stops)
        else:
            y = torch.cat([F.linear(part, w) for part, w in zip(x.split(counts.tolist()), weight, strict=True)])
        if self.bias is not None:
            bias = _local(self.bias).view(-1, self.out_features)  # [E, out]
            y = y + bias.repeat_interleave(counts, dim=0, output_size=x.size(0))
        return y


def _local(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter that is divided among ranks."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class Experts(nn.Module):
    """MLPs, with a gate or without, for tokens that are sorted by expert."""

    def __init__(self, config: MoEConfig, hidden_size: int, activation: Activation, bias: bool) -> None:
        super().__init__()
        sizes = config.num_experts, hidden_size, config.ffn_hidden_size, bias
        self.activation = activation
        if activation.is_gated:
            self.linear_fc1_gate, self.linear_fc1_up = GroupedLinear(*sizes), GroupedLinear(*sizes)
        else:
            self.linear_fc1 = GroupedLinear(*sizes)
        self.linear_fc2 = GroupedLinear(config.num_experts, config.ffn_hidden_size, hidden_size, bias)

    def forward(self, x: Tensor, stops: Tensor) -> Tensor:
        """``x`` [R, H] -> [R, H]; ``stops`` as in ``GroupedLinear``."""
        if self.activation.is_gated:
            hidden = self.activation.gate(self.linear_fc1_gate(x, stops), self.linear_fc1_up(x, stops))
        else:
            hidden = self.activation(self.linear_fc1(x, stops))
        return self.linear_fc2(hidden, stops)


def run_experts(experts: Experts, counts: Tensor, capacity: int | None = None) -> Callable[[Tensor], Tensor]:
    """Return a function of rows [R, H] -> [R, H], sorted by expert, of which expert e has ``counts[e]``, int64 [E].

    The last expert also computes the rest: to omit it, the host would wait for a GPU. capacity: ``parallel.experts``'s.
    """
    stops = counts.cumsum(0).int()
    return lambda rows: experts(rows, F.pad(stops[:-1], (0, 1), value=rows.size(0)))


class Router(nn.Linear):
    """Scores of tokens for experts, in fp32: 16 bits would change the choice."""

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [T, H] -> fp32 [T, E]."""
        return F.linear(x.float(), self.weight.float(), None if self.bias is None else self.bias.float())


class MoE(nn.Module):
    """The router, its experts, and the expert that has all tokens, if there is one."""

    expert_bias: Tensor  # fp32 [E], and
    chosen: Tensor  # fp32 [E], tokens of this step so far, if config.bias_update_rate is given

    def __init__(
        self,
        config: MoEConfig,
        hidden_size: int,
        activation: Activation,
        shared_expert: nn.Module | None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.router = Router(hidden_size, config.num_experts, bias=config.router_bias)
        self.experts = Experts(config, hidden_size, activation, bias)
        self.shared_expert = shared_expert
        if config.shared_expert_gate:
            self.shared_gate = nn.Linear(hidden_size, 1, bias=False)
        if config.residual:  # DeepSpeed-MoE, arXiv 2201.05596, section 4.1
            self.coefficient = nn.Linear(hidden_size, 2)
        if config.bias_update_rate is not None:
            self.register_buffer("expert_bias", torch.zeros(config.num_experts))
            self.register_buffer("chosen", torch.zeros(config.num_experts), persistent=False)
        self.run_experts: Callable[..., Callable[[Tensor], Tensor]] = run_experts  # parallel.experts replaces it
        self.sample_group: dist.ProcessGroup | None = None  # the ranks with the other parts of the same samples

    def forward(self, x: Tensor) -> tuple[Tensor, Routed]:
        """``x`` [B, S, H] -> [B, S, H]."""
        config, tokens = self.config, x.flatten(0, -2)  # [T, H]
        logits = self.router(tokens)  # [T, E]
        bias = self.expert_bias if config.bias_update_rate is not None else None
        routing = route(logits, config, bias, self.training)
        if config.bias_update_rate is not None and self.training:
            self.chosen += routing.load  # recomputation counts all of a layer's tokens twice, which changes no sign
        factor = config.expert_capacity_factor
        if not self.training and config.eval_capacity_factor is not None:
            factor = config.eval_capacity_factor
        order, counts, capacity = sorted_by_expert(routing, factor, config.min_capacity)
        run = self.run_experts(self.experts, counts, capacity if self.training else None)  # then all have T tokens
        kept = counts.sum()
        shared = None if self.shared_expert is None else self.shared_expert(x)
        rows, weights = tokens[order // config.router_topk], routing.weights.flatten()[order].unsqueeze(-1)  # [R, …]
        if factor is not None:  # zeros for what is dropped: an overflow of it would be NaN in an expert's gradient
            is_dropped = torch.arange(len(order), device=x.device).unsqueeze(-1) >= kept
            rows, weights = rows.masked_fill(is_dropped, 0.0), weights.masked_fill(is_dropped, 0.0)
        out = run(rows)  # [R, H]
        # In the order of tokens again, so that each token's sum has one order, whatever the device does.
        placed = out.new_zeros(routing.experts.numel(), out.size(-1)).index_copy(0, order, out * weights.to(out.dtype))
        y = placed.unflatten(0, (-1, config.router_topk)).sum(dim=1).view_as(x)
        if config.residual:
            assert shared is not None
            share = self.coefficient(x).softmax(dim=-1)  # [B, S, 2]
            y = y * share[..., :1] + shared * share[..., 1:]
        elif shared is not None:
            y = y + (self.shared_gate(x).sigmoid() * shared if config.shared_expert_gate else shared)
        # The loss counts what a token would choose without bias and groups, over G samples or 1 micro-batch.
        is_free = bias is None and config.router_num_groups is None
        choices = routing.experts if is_free else routing.scores.topk(config.router_topk, dim=-1).indices
        num_groups = x.size(0) if config.load_balancing == "seq_aux_loss" else 1
        first_of_group = config.num_experts * torch.arange(num_groups, device=x.device).unsqueeze(-1)
        loads = count_each((choices.view(num_groups, -1) + first_of_group).flatten(), num_groups * config.num_experts)
        loads = torch.cat([routing.load.unsqueeze(0), loads.view(num_groups, -1)])  # [1 + G, E]
        if self.sample_group is not None:
            dist.all_reduce(loads, group=self.sample_group)
        scores = routing.scores.unflatten(0, (num_groups, -1))
        return y, Routed(
            balancing_loss=config.aux_loss_coeff * balancing_loss(scores, loads[1:]),
            z_loss=config.z_loss_coeff * z_loss(logits),
            load=loads[0],
            dropped=routing.experts.numel() - kept,
            counted=loads[1:].sum(dim=0),
            mean_scores=routing.scores.sum(dim=0) / max(tokens.size(0), 1),
            entropy=torch.special.entr(routing.scores.detach()).sum(dim=-1).mean(),
        )


@torch.no_grad()
def finish_step(layers: Sequence[MoE], has_stepped: bool, add_up: Callable[[Tensor], None]) -> None:
    """Raise the biases of experts that had less than their share of a step's tokens, and lower the others'.

    They move by ``bias_update_rate``, without gradients (Wang et al., arXiv 2408.15664, algorithm 1). If the step
    was skipped, its tokens are forgotten. add_up: sums a tensor over all data-parallel ranks, in place.
    """
    if not layers or (rate := layers[0].config.bias_update_rate) is None:
        return
    chosen = torch.cat([layer.chosen for layer in layers])
    if has_stepped:
        add_up(chosen)
    for layer, tokens in zip(layers, chosen.split([layer.chosen.numel() for layer in layers]), strict=True):
        if has_stepped:
            layer.expert_bias += rate * (tokens.mean() - tokens).sign()
        layer.chosen.zero_()


def sorted_by_expert(routing: Routing, factor: float | None, least: int) -> tuple[Tensor, Tensor, int | None]:
    """Sort the choices of T * k by expert; those beyond its capacity, which weigh least, come last or not at all.

    factor, least: of the capacity. Returns which ones, int64 [R], where the host knows R; how many of each expert are
    kept, int64 [E]; and the capacity, unless that allows more than ``MOST_PADDING`` * T * k rows.
    """
    experts, num_experts = routing.experts.flatten(), routing.load.numel()
    if factor is None:
        return experts.argsort(stable=True), routing.load, None
    capacity = min(max(math.ceil(experts.numel() / num_experts * factor), least), experts.numel())
    heaviest = routing.weights.detach().flatten().argsort(descending=True, stable=True)
    order = heaviest[experts[heaviest].argsort(stable=True)]
    begins = routing.load.cumsum(0) - routing.load
    place = torch.arange(order.numel(), device=order.device) - begins[experts[order]]  # in its expert's queue
    kept_first = (place >= capacity).byte().argsort(stable=True)[: num_experts * capacity]
    is_padded = num_experts * capacity <= MOST_PADDING * experts.numel()
    return order[kept_first], routing.load.clamp(max=capacity), capacity if is_padded else None


def active_parameters(model: nn.Module) -> int:
    """Count the parameters that a token meets: ``router_topk`` of each layer's experts; tied ones once."""
    idle = 0
    for module in model.modules():
        if isinstance(module, MoE):
            size = sum(parameter.numel() for parameter in module.experts.parameters())
            idle += size // module.config.num_experts * (module.config.num_experts - module.config.router_topk)
    return sum(parameter.numel() for parameter in model.parameters()) - idle


def auxiliary_losses(layers: Sequence[Routed], config: MoEConfig) -> dict[str, Tensor]:
    """Return what is added to the loss, by name: sums over the layers. A loss without a coefficient is left out."""
    losses = {}
    if config.aux_loss_coeff and config.load_balancing == "all_layers_aux_loss":
        scores, counted = (
            torch.stack(each) for each in zip(*((r.mean_scores, r.counted) for r in layers), strict=True)
        )
        losses["load balancing loss"] = config.aux_loss_coeff * balancing_loss(scores, counted.sum(dim=0))
    elif config.aux_loss_coeff:
        losses["load balancing loss"] = torch.stack([routed.balancing_loss for routed in layers]).sum()
    if config.z_loss_coeff:
        losses["router z-loss"] = torch.stack([routed.z_loss for routed in layers]).sum()
    return losses


def observations(layers: Sequence[Routed], config: MoEConfig, num_layers: int) -> dict[str, Tensor]:
    """Return what is logged, by name: the sum over ``layers``, divided by the model's ``num_layers`` with experts."""
    loads = [routed.load.float() for routed in layers]  # [E] each
    observed = {
        "expert load (max/mean)": torch.stack([load.amax() / load.mean() for load in loads]),
        "router entropy": torch.stack([routed.entropy for routed in layers]),
    }
    if config.expert_capacity_factor is not None:
        observed["dropped tokens (share)"] = torch.stack(
            [routed.dropped / load.sum() for routed, load in zip(layers, loads, strict=True)]
        )
    return {name: values.sum() / num_layers for name, values in observed.items()}
