"""Write small checkpoints in the layouts of Megatron-LM and Megatron-DeepSpeed, from a model of ours.

Shares nothing with the code under test, and goes the other way: replaces names in turn, and shards by ends of names.
"""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.models.decoder import Decoder, DecoderConfig
from tests.models.configs import gpt_config, llama_config

State = dict[str, Tensor]
IDS = 257  # ids of the tokenizer
PADDED = 264  # to multiples of 8
CONFIGS: dict[str, DecoderConfig] = {
    "gpt": gpt_config(4, 32, 4, PADDED, 32, ffn_hidden_size=128, num_query_groups=4, kv_channels=8),
    "llama": llama_config(
        4, 32, 4, PADDED, ffn_hidden_size=48, num_query_groups=2, kv_channels=16, qk_layernorm=True, rotary_base=500
    ),
}


def random_model(config: DecoderConfig) -> State:
    """Return random parameters and buffers, by our names."""
    generator = torch.Generator().manual_seed(0)
    shapes = {name: tensor.shape for name, tensor in Decoder(config).state_dict().items()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


SAME_NAMES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("position_embedding_type", "normalization", "norm_epsilon", "swiglu", "add_bias_linear", "qk_layernorm"),
    *("attention_dropout", "hidden_dropout"),
)


def args_of(config: DecoderConfig, tp: int = 1, pp: int = 1, **more: Any) -> argparse.Namespace:
    values = {name: getattr(config, name) for name in SAME_NAMES}
    values |= dict(group_query_attention=config.num_query_groups != config.num_attention_heads, init_method_std=0.02)
    values |= dict(seq_length=32, max_position_embeddings=32, rotary_base=int(config.rotary_base), rotary_percent=1.0)
    values |= dict(untie_embeddings_and_output_weights=not config.tie_embeddings, make_vocab_size_divisible_by=8)
    values |= dict(tokenizer_type="NullTokenizer", vocab_size=IDS - 1)
    values |= dict(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    return argparse.Namespace(**(values | dict(consumed_train_samples=40, consumed_valid_samples=16) | more))


def common(args: argparse.Namespace, version: float = 3.0) -> dict[str, Any]:
    scheduler = {"max_lr": 0.01, "num_steps": vars(args).pop("scheduled_samples", 32)}
    return {"args": args, "checkpoint_version": version, "iteration": 5, "opt_param_scheduler": scheduler}


def megatron_core(ours: State) -> State:
    """Rename to megatron-core's local layers."""
    theirs = {}
    for name, tensor in ours.items():
        if "fc1_up" in name:
            continue
        if "fc1_gate" in name:
            tensor = torch.cat([tensor, ours[name.replace("fc1_gate", "fc1_up")]])
        theirs[rename(name, CORE_NAMES)] = tensor
    return theirs


CORE_NAMES = """word_embeddings embedding.word_embeddings, position_embeddings embedding.position_embeddings,
    layers. decoder.layers., final_norm decoder.final_layernorm, input_norm input_layernorm,
    pre_mlp_norm pre_mlp_layernorm, fc1_gate fc1"""
FUSED_NAMES = "input_layernorm. self_attention.linear_qkv.layer_norm_, pre_mlp_layernorm. mlp.linear_fc1.layer_norm_"
LEGACY_NAMES = """linear_qkv query_key_value, linear_proj dense, pre_mlp_layernorm post_attention_layernorm,
    linear_fc1 dense_h_to_4h, linear_fc2 dense_4h_to_h"""


def rename(name: str, table: str) -> str:
    """Replace each "old new" of a table in turn."""
    for old, new in map(str.split, table.split(",")):
        name = name.replace(old, new)
    return name


def with_rows(state: State, rows: int) -> State:
    """Cut or pad the vocabulary to ``rows``."""
    result = dict(state)
    for name in state:
        if "word_embeddings" in name or "output_layer" in name:
            more = torch.ones(max(0, rows - len(state[name])), state[name].shape[1])
            result[name] = torch.cat([state[name][:rows], more])
    return result


def tensor_parallel(state: State, ranks: int) -> list[State]:
    """Return each rank's shards."""
    states: list[State] = [{} for _ in range(ranks)]
    for name, tensor in state.items():
        if "linear_fc1.weight" in name and tensor.shape[0] == 2 * 48:  # SwiGLU's
            gates, ups = (half.chunk(ranks) for half in tensor.chunk(2))
            shards = [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
        elif any(part in name for part in ("word_embeddings", "output_layer", "linear_qkv", "linear_fc1")):
            shards = list(tensor.chunk(ranks))
        elif name.endswith(("linear_proj.weight", "linear_fc2.weight")):
            shards = list(tensor.chunk(ranks, dim=1))
        else:
            shards = [tensor] * ranks
        for rank, shard in zip(states, shards, strict=True):
            rank[name] = shard.clone()
    return states


def two_ranks(ours: State) -> list[State]:
    return tensor_parallel(with_rows(megatron_core(ours), max(272, len(ours["word_embeddings.weight"]))), 2)


def stage(state: State, layers: list[int], first: bool, last: bool) -> State:
    """Return a pipeline stage, whose layers are numbered from 0."""
    result = {}
    for name, tensor in state.items():
        words = name.split(".")
        if words[1] == "layers":
            if int(words[2]) in layers:
                words[2] = str(layers.index(int(words[2])))
                result[".".join(words)] = tensor
        elif first if words[0] == "embedding" else last:
            result[name] = tensor
    if last and not first and "output_layer.weight" not in state:  # the copy of tied embeddings
        result["output_layer.weight"] = state["embedding.word_embeddings.weight"]
    return result


def legacy(state: State) -> dict[str, Any]:
    """Nest, and rename to what was before megatron-core."""
    embedding: dict[str, Any] = {}
    encoder: dict[str, Tensor] = {}
    model: dict[str, Any] = {"embedding": embedding, "encoder": encoder}
    for name, tensor in state.items():
        if name.startswith("embedding."):
            embedding[name.split(".")[1]] = {"weight": tensor}
        elif name == "output_layer.weight":
            model["output_layer"] = {"weight": tensor}
        else:
            encoder[rename(name.removeprefix("decoder."), LEGACY_NAMES)] = tensor
    return {"language_model": model}


def flat(state: dict[str, Any], prefix: str = "") -> State:
    result: State = {}
    for name, value in state.items():
        result |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return result


def pipeline_modules(state: State) -> dict[str, State]:
    """Return the modules of DeepSpeed's GPTModelPipe by number: embeddings are 01, layers begin at 03."""
    modules: dict[str, State] = {}
    last = 3 + max(int(name.split(".")[2]) for name in state if ".layers." in name)
    for name, tensor in flat(legacy(state)).items():
        words = name.removeprefix("language_model.").split(".")
        if words[0] == "embedding":
            number, rest = 1, words[1:]
        elif words[0] == "output_layer":
            number, rest = last + 3, ["lm_head", "weight"]
        elif words[1] == "layers":
            number, rest = 3 + int(words[2]), words[3:]
        else:
            number, rest = last + 2, words[2:]
        modules.setdefault(f"{number:02d}", {})[".".join(rest)] = tensor
    if "output_layer.weight" not in state:  # tied embeddings once more
        modules[f"{last + 3:02d}"] = {"word_embeddings.weight": state["embedding.word_embeddings.weight"]}
    return modules


def save(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)


# Formats: each writes a model of ours into a folder, at iteration 5


def write_torch(folder: Path, ours: State, config: DecoderConfig) -> None:
    """Two tensor-parallel ranks, two stages of two virtual ones each, Transformer Engine's names."""
    args = args_of(config, tp=2, pp=2, virtual_pipeline_model_parallel_size=2)
    for t, rank in enumerate(two_ranks(ours)):
        for p in range(2):
            chunks = [stage(rank, [2 * c + p], first=p + c == 0, last=p + c == 2) for c in range(2)]
            fused = [{rename(name, FUSED_NAMES): x for name, x in chunk.items()} for chunk in chunks]
            models = {f"model{c}": chunk for c, chunk in enumerate(fused)}
            save(folder / f"iter_0000005/mp_rank_{t:02d}_{p:03d}/model_optim_rng.pt", common(args) | models)
    (folder / "latest_checkpointed_iteration.txt").write_text("5")


def write_legacy(folder: Path, ours: State, config: DecoderConfig, version: float = 3.0) -> None:
    """Two tensor-parallel ranks, with old names."""
    args = args_of(config, tp=2)
    for t, rank in enumerate(two_ranks(ours)):
        file = folder / f"iter_0000005/mp_rank_{t:02d}/model_optim_rng.pt"
        save(file, common(args, version) | {"model": legacy(rank)})
    (folder / "latest_checkpointed_iteration.txt").write_text("5")


def write_deepspeed(folder: Path, ours: State, config: DecoderConfig, has_pipeline: bool = False) -> None:
    """Two tensor-parallel ranks; with a PipelineModule they save module by module."""
    args = args_of(config, tp=2)
    for t, rank in enumerate(two_ranks(ours)):
        module = {"module": None if has_pipeline else legacy(rank)}
        save(folder / f"global_step5/mp_rank_{t:02d}_model_states.pt", common(args) | module)
        for number, tensors in pipeline_modules(rank).items() if has_pipeline else ():
            save(folder / f"global_step5/layer_{number}-model_{t:02d}-model_states.pt", tensors)
    (folder / "latest").write_text("global_step5")


def write_universal(
    folder: Path,
    ours: State,
    config: DecoderConfig,
    moments: dict[str, State] | None = None,
    rows: int = IDS,
    **more: Any,
) -> None:
    """Whole, the vocabulary cut to ``rows`` without padding, and what Adam keeps: ``moments``, by our names."""
    root = folder / "global_step5_universal"
    save(root / "mp_rank_00_model_states.pt", common(args_of(config, **more)) | {"module": None})
    kinds = moments or {"exp_avg": ours, "exp_avg_sq": ours}
    for kind, state in {"fp32": ours, **kinds}.items():
        for name, tensor in flat(legacy(with_rows(megatron_core(state), rows))).items():
            save(root / "zero" / name / f"{kind}.pt", {"param": tensor, "cat_dim": 0})
            save(root / "zero" / name / "step.pt", torch.tensor(5.0))
    (folder / "latest_universal").write_text("global_step5_universal")


FORMATS: dict[str, Callable[..., None]] = {
    "torch": write_torch,
    "legacy": write_legacy,
    "deepspeed": write_deepspeed,
    "deepspeed-pipeline": functools.partial(write_deepspeed, has_pipeline=True),
    "universal": write_universal,
}
