"""Build, run and save small models of megatron-core on the CPU, with its own functions.

Every function runs on all tensor-parallel ranks of a gloo group.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, optim_state_to_sharding_state
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

POSITIONS = 32
SHAPE = dict(
    num_layers=3, hidden_size=32, num_attention_heads=4, seq_length=POSITIONS, max_position_embeddings=POSITIONS
)
COMMON = SHAPE | dict(
    attention_dropout=0.0,
    hidden_dropout=0.0,
    norm_epsilon=1e-5,
    init_method_std=0.2,
    tokenizer_type="NullTokenizer",
    vocab_size=256,
    make_vocab_size_divisible_by=8,
    bf16=False,
    fp16=False,
    model_type=ModelType.encoder_or_decoder,
    attention_backend=AttnBackend.auto,
    params_dtype=torch.float32,
    iteration=3,
    consumed_train_samples=12,
    consumed_valid_samples=8,
)
GPT = COMMON | dict(ffn_hidden_size=128, kv_channels=8, group_query_attention=False, num_query_groups=1)
GPT |= dict(normalization="LayerNorm", swiglu=False, bias_gelu_fusion=True, add_bias_linear=True, add_qkv_bias=True)
GPT |= dict(position_embedding_type="learned_absolute", add_position_embedding=True)
GPT |= dict(untie_embeddings_and_output_weights=False)
LLAMA = COMMON | dict(ffn_hidden_size=48, kv_channels=16, group_query_attention=True, num_query_groups=2)
LLAMA |= dict(normalization="RMSNorm", swiglu=True, add_bias_linear=False, add_qkv_bias=False, qk_layernorm=True)
LLAMA |= dict(position_embedding_type="rope", rotary_base=500, rotary_percent=0.5, add_position_embedding=False)
LLAMA |= dict(untie_embeddings_and_output_weights=True)
FLAGS: dict[str, dict[str, Any]] = {"gpt": GPT, "gpt-exact": GPT | dict(bias_gelu_fusion=False), "llama": LLAMA}


def args_of(name: str, tp: int = 1, **more: Any) -> argparse.Namespace:
    """Return the ``args`` that Megatron's trainer saves."""
    multiple = COMMON["make_vocab_size_divisible_by"] * tp
    padded = -(-(COMMON["vocab_size"] + 1) // multiple) * multiple  # its NullTokenizer adds an end of document
    sizes = dict(tensor_model_parallel_size=tp, pipeline_model_parallel_size=1, padded_vocab_size=padded)
    return argparse.Namespace(**(FLAGS[name] | sizes | more))


def build(args: argparse.Namespace) -> GPTModel:
    """Megatron's model of these flags, as its trainer builds it with --transformer-impl local, with random weights."""
    tp = args.tensor_model_parallel_size
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
        # Its plain attention asks for a GPU's random states and memory, whatever the device.
        tensor_parallel.random.initialize_rng_tracker()
        tensor_parallel.random._CUDA_RNG_STATE_TRACKER.fork = contextlib.nullcontext
        torch.cuda.current_device = lambda: torch.device("cpu")
        torch.cuda.synchronize = lambda *device: None
        multiprocessing.current_process()._config["daemon"] = False  # its writers are processes of their own
    same = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "normalization")
    same += ("tensor_model_parallel_size", "add_bias_linear", "add_qkv_bias", "attention_dropout", "hidden_dropout")
    config = TransformerConfig(
        **{name: getattr(args, name) for name in same},
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        layernorm_epsilon=args.norm_epsilon,
        qk_layernorm=getattr(args, "qk_layernorm", False),
        gated_linear_unit=args.swiglu,
        activation_func=F.silu if args.swiglu else F.gelu,
        bias_activation_fusion=not args.swiglu and args.bias_gelu_fusion,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )
    torch.manual_seed(1)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=args.normalization),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=getattr(args, "rotary_percent", 1.0),
        rotary_base=getattr(args, "rotary_base", 10000),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        parallel_output=False,
    )
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "norm" in name or name.endswith("bias"):  # 1 and 0, of which a mistake would show nothing
                whole = not getattr(parameter, "tensor_model_parallel", False)
                generator = torch.Generator().manual_seed(0 if whole else 1 + dist.get_rank())
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def logits(model: GPTModel, tokens: Tensor) -> Tensor:
    """[B, S, V] of tokens [B, S]."""
    batch, length = tokens.shape
    hidden = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    return model(tokens, torch.arange(length).expand(batch, -1), hidden)


def train(model: GPTModel, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    """Losses of one optimizer step on each of the batches [B, S + 1]."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(logits(model, batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def save_torch_dist(folder: Path, model: GPTModel, args: Any, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Save as Megatron's trainer does with --ckpt-format torch_dist, and its fp32 optimizer."""
    state = common(args) | {"model": model.sharded_state_dict()}
    if optimizer is not None:
        kept = optimizer.state_dict()
        kept["state"] = {i: dict(state) for i, state in kept["state"].items()}  # a copy, to change
        steps = {float(state.pop("step")) for state in kept["state"].values()}
        ids = get_param_id_to_sharded_param_map(state["model"], optimizer.param_groups[0]["params"])
        optim_state_to_sharding_state(kept, ids)
        (kept["state"]["common_step"],) = steps
        state["optimizer"] = kept
    checkpoint = folder / f"iter_{args.iteration:07d}"
    if dist.get_rank() == 0:
        checkpoint.mkdir(parents=True)
        (folder / "latest_checkpointed_iteration.txt").write_text(str(args.iteration))
    dist.barrier()
    dist_checkpointing.save(state, str(checkpoint))


def save_torch(folder: Path, model: GPTModel, args: Any) -> None:
    """Save as Megatron's trainer does with --ckpt-format torch."""
    rank_folder = folder / f"iter_{args.iteration:07d}" / f"mp_rank_{dist.get_rank():02d}"
    rank_folder.mkdir(parents=True)
    random = {"random_rng_state": (3, (1, 2), None), "np_rng_state": np.random.get_state()}
    state = common(args) | {"model": model.state_dict_for_save_checkpoint(), "rng_state": [random]}
    torch.save(state, rank_folder / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(args.iteration))


def common(args: Any) -> dict[str, Any]:
    scheduler = {"max_lr": 0.01, "num_steps": args.consumed_train_samples, "lr_decay_style": "constant"}
    counters = {"iteration": args.iteration, "num_floating_point_operations_so_far": 1e9}
    return {"args": args, "checkpoint_version": 3.0, "opt_param_scheduler": scheduler} | counters


def load_torch_dist(folder: Path, args: Any) -> GPTModel:
    """Load as Megatron's trainer does with --no-load-optim --no-load-rng; every parameter must come from the file."""
    model = build(args)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    checkpoint = folder / f"iter_{int((folder / 'latest_checkpointed_iteration.txt').read_text()):07d}"
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(checkpoint))
    assert loaded["iteration"] == args.iteration and loaded["args"].hidden_size == args.hidden_size
    model.load_state_dict(loaded["model"])
    return model
