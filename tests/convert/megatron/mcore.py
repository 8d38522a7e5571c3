"""Build, run and save small models of megatron-core on the CPU, with its own functions.

Every function runs on all tensor-, pipeline- and expert-parallel ranks of a gloo group.
"""

import argparse
import contextlib
import dataclasses
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
from megatron.core.fusions import fused_softmax
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
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
EXPERTS = dict(
    num_layers=4, num_experts=8, moe_router_topk=4, moe_ffn_hidden_size=24, moe_router_load_balancing_type="none",
    moe_router_topk_scaling_factor=None, untie_embeddings_and_output_weights=True, normalization="RMSNorm",
    add_position_embedding=False,
)  # fmt: skip
DEEPSEEK = COMMON | EXPERTS | dict(
    ffn_hidden_size=48, kv_channels=8, group_query_attention=False, num_query_groups=1, swiglu=True,
    add_bias_linear=False, add_qkv_bias=False, qk_layernorm=True, position_embedding_type="rope", rotary_base=500,
    multi_latent_attention=True, q_lora_rank=16, kv_lora_rank=12, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8,
    rope_type="yarn", rotary_scaling_factor=4.0, original_max_position_embeddings=16, beta_fast=8, beta_slow=1,
    mscale=0.7, mscale_all_dim=1.2, moe_layer_freq=[0, 1, 1, 1], moe_router_score_function="sigmoid",
    moe_router_topk_scaling_factor=2.5, moe_router_enable_expert_bias=True, moe_router_num_groups=4,
    moe_router_group_topk=2, moe_shared_expert_intermediate_size=40, moe_router_dtype="fp32",
)  # fmt: skip
GPT_OSS = COMMON | EXPERTS | dict(
    ffn_hidden_size=24, kv_channels=16, group_query_attention=True, num_query_groups=2, swiglu=False, quick_geglu=True,
    add_bias_linear=True, add_qkv_bias=True, glu_linear_offset=1.0, activation_func_clamp_value=0.5,
    bias_gelu_fusion=False, softmax_type="learnable", window_size=(5, 0), window_attn_skip_freq=2, moe_layer_freq=1,
    position_embedding_type="yarn", rotary_base=500, yarn_rotary_scaling_factor=4.0,
    yarn_original_max_position_embeddings=16, yarn_beta_fast=8.0, yarn_beta_slow=1.0, yarn_mscale=None,
    yarn_mscale_all_dim=None, yarn_correction_range_round_to_int=False, expert_tensor_parallel_size=1,
)  # fmt: skip
FLAGS: dict[str, dict[str, Any]] = {"gpt": GPT, "gpt-exact": GPT | dict(bias_gelu_fusion=False), "llama": LLAMA}
FLAGS |= {"deepseek": DEEPSEEK, "gpt-oss": GPT_OSS}


def args_of(name: str, tp: int = 1, pp: int = 1, ep: int = 1, **more: Any) -> argparse.Namespace:
    """Return the ``args`` that Megatron's trainer saves."""
    multiple = COMMON["make_vocab_size_divisible_by"] * tp
    padded = -(-(COMMON["vocab_size"] + 1) // multiple) * multiple  # its NullTokenizer adds an end of document
    sizes = dict(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, padded_vocab_size=padded)
    sizes |= dict(expert_model_parallel_size=ep)
    return argparse.Namespace(**(FLAGS[name] | sizes | more))


class TransformerEngineLinear:
    """What a layer of latent attention asks whether it is, which must be a class."""


class LatentCore(DotProductAttention):
    """Attention without Transformer Engine, which latent attention asks for; values are as wide as kv_channels."""

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        assert v_channels in (0, self.config.kv_channels)


def build(args: argparse.Namespace) -> GPTModel:
    """Megatron's model of these flags, as its trainer builds it with --transformer-impl local, with random weights."""
    kinds = ("tensor_model", "pipeline_model", "expert_model")
    if not parallel_state.model_parallel_is_initialized():
        sizes = {f"{kind}_parallel_size": getattr(args, f"{kind}_parallel_size") for kind in kinds}
        etp = getattr(args, "expert_tensor_parallel_size", None)
        parallel_state.initialize_model_parallel(**sizes, expert_tensor_parallel_size=etp)
        # Its plain attention asks for a GPU's random states and memory, whatever the device.
        tensor_parallel.random.initialize_rng_tracker()
        tensor_parallel.random._CUDA_RNG_STATE_TRACKER.fork = contextlib.nullcontext
        torch.cuda.current_device = lambda: torch.device("cpu")
        torch.cuda.synchronize = lambda *device: None
        multiprocessing.current_process()._config["daemon"] = False  # its writers are processes of their own
        fused_softmax.get_sliding_window_causal_mask = window_mask
        multi_latent_attention.TELinear = TransformerEngineLinear
        moe_utils.te_general_gemm = None
    config_class = MLATransformerConfig if hasattr(args, "kv_lora_rank") else TransformerConfig
    fields = {field.name for field in dataclasses.fields(config_class)}
    gated = args.swiglu or hasattr(args, "quick_geglu")
    config = config_class(
        **{name: value for name, value in vars(args).items() if name in fields - {"num_query_groups"}},
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        num_moe_experts=getattr(args, "num_experts", None),
        layernorm_epsilon=args.norm_epsilon,
        gated_linear_unit=gated,
        activation_func=F.silu if args.swiglu else quick_gelu if gated else F.gelu,
        bias_activation_fusion=not gated and args.bias_gelu_fusion,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )
    for name, value in vars(args).items():
        if name.startswith("yarn_"):  # GPTModel looks for them, and TransformerConfig has no fields
            setattr(config, name, value)
    tp_rank, pp_rank, ep_rank = (getattr(parallel_state, f"get_{kind}_parallel_rank")() for kind in kinds)
    torch.manual_seed(1 + pp_rank)
    if config.num_moe_experts is None:
        spec: Any = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=args.normalization)
    else:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=args.normalization)
        for layer in spec.layer_specs if config.multi_latent_attention else ():
            layer.submodules.self_attention.submodules.core_attention = LatentCore
    model = GPTModel(
        config,
        spec,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
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
            if ".experts." in name:  # whose first numbers are the same on all expert-parallel ranks
                generator = torch.Generator().manual_seed(100 + ep_rank)
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
            elif "norm" in name or name.endswith("bias"):  # 1 and 0, of which a mistake would show nothing
                whole = not getattr(parameter, "tensor_model_parallel", False)
                generator = torch.Generator().manual_seed(0 if whole else 1 + tp_rank)
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer += 0.1 * torch.randn(buffer.shape, generator=torch.Generator().manual_seed(2))
    return model.eval()


def window_mask(queries: int, keys: int, window: tuple[int, int]) -> Tensor:
    """What megatron-core makes on a GPU: True where a query [Q] does not attend to a key [K]."""
    ones = torch.ones(queries, keys, dtype=torch.bool)
    return ~ones.triu(keys - queries - window[0]).tril(keys - queries + window[1])


def logits(model: GPTModel, tokens: Tensor) -> Tensor:
    """[B, S, V] of tokens [B, S], on the ranks of the last stage; others return hidden states."""
    batch, length = tokens.shape
    if not parallel_state.is_pipeline_first_stage():
        arrived = torch.empty(length, batch, model.config.hidden_size)
        dist.recv(arrived, parallel_state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(arrived)
    masked = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    out = model(tokens, torch.arange(length).expand(batch, -1), masked)
    if not parallel_state.is_pipeline_last_stage():
        dist.send(out.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
    return out


def sharded_state(model: GPTModel) -> dict[str, Any]:
    """With the metadata that Megatron's trainer gives."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True, "dp_cp_group": group}
    return model.sharded_state_dict(metadata=metadata)


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
    state = common(args) | {"model": sharded_state(model)}
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
        for tensor in (*model.parameters(), *(x for name, x in model.named_buffers() if name.endswith("expert_bias"))):
            tensor.fill_(torch.nan)
    checkpoint = folder / f"iter_{int((folder / 'latest_checkpointed_iteration.txt').read_text()):07d}"
    loaded = dist_checkpointing.load({"model": sharded_state(model)}, str(checkpoint))
    assert loaded["iteration"] == args.iteration and loaded["args"].hidden_size == args.hidden_size
    model.load_state_dict(loaded["model"])
    return model
