"""Shard a model over the data-parallel ranks: ZeRO stages 0 to 3 by PyTorch FSDP2."""

from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from megatron_zpp.models.moe import MoE
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.parallel.mesh import Mesh
from megatron_zpp.settings.groups import PrecisionSettings, ZeroSettings


def mixed_precision(precision: PrecisionSettings) -> MixedPrecisionPolicy:
    """Convert Megatron's precision flags to FSDP2's policy. Master parameters and the optimizer stay in fp32."""
    if not (precision.bf16 or precision.fp16):
        return MixedPrecisionPolicy()
    compute = torch.bfloat16 if precision.bf16 else torch.float16
    if precision.grad_reduce_in_bf16:
        reduce = torch.bfloat16
    elif precision.bf16 or precision.accumulate_allreduce_grads_in_fp32:
        reduce = torch.float32
    else:
        reduce = compute
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)


def offloading(zero: ZeroSettings, device: torch.device) -> tuple[OffloadPolicy, torch.device]:
    """Return FSDP2's policy for a rank's shards, and their device: the one that computes, or host memory."""
    if not zero.cpu_offload:
        return OffloadPolicy(), device
    return CPUOffloadPolicy(pin_memory=device.type == "cuda"), torch.device("cpu")


def shard_model(
    model: Transformer, mesh: Mesh, zero_stage: int, precision: MixedPrecisionPolicy, offload: OffloadPolicy
) -> None:
    """Shard ``model``, built on the meta device, in place: its layers, its ends, and the rest.

    With expert parallelism a layer's experts are a unit of their own, of the ranks that have the same ones.
    Stage 3 shards parameters too: it gathers layers for each forward and backward pass, the others once for
    both. Stages 2 and 1 keep all from the first forward pass of an optimizer step to its last backward pass. Stage 0
    shards nothing: ``mesh`` must have a replica for each rank.
    """
    shard = partial(fully_shard, mesh=mesh.sharding, mp_policy=precision, offload_policy=offload)
    for layer in model.layers:
        if mesh.ep_size > 1 and isinstance(layer.mlp, MoE):
            shard(layer.mlp.experts, mesh=mesh.expert_sharding, reshard_after_forward=zero_stage == 3)
        shard(layer, reshard_after_forward=zero_stage == 3)
    ends = [model._modules.get(name) for name in model.ends]
    for module in (*(end for end in ends if end is not None), model):  # a pipeline's stage has some of the ends
        shard(module, reshard_after_forward=False)


def prepare_backward(model: nn.Module, zero_stage: int, is_last_micro_batch: bool) -> None:
    """Set what a ZeRO stage keeps between the micro-batches of one optimizer step."""
    if not isinstance(model, FSDPModule):
        return  # a model that the caller has not sharded
    if zero_stage <= 1:
        model.set_requires_gradient_sync(is_last_micro_batch)  # reduce gradients only at the last
    model.set_requires_all_reduce(is_last_micro_batch)  # HSDP: all-reduce over replicas only then
    if zero_stage <= 2:
        model.set_reshard_after_backward(is_last_micro_batch)  # keep parameters gathered until then
    model.set_is_last_backward(is_last_micro_batch)  # ``ZeroPP`` does so for each unit; stage 0 has none
