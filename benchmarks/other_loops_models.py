"""Models of transformers, small and from configurations, in a plain loop; for ``other_loops.py``."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import transformers
from other_loops import Trained
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from megatron_zpp.zeropp import ZeroPPConfig, apply_zeropp

VOCABULARY, TOKENS, SAMPLES = 512, 32, 2  # of each micro-batch
Batch = dict[str, Tensor]

ENCODER: dict[str, Any] = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
DECODER: dict[str, Any] = ENCODER | dict(vocab_size=VOCABULARY, num_key_value_heads=2, head_dim=16, use_cache=False)
GPT2: dict[str, Any] = dict(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=TOKENS, use_cache=False)


def counting(generator: torch.Generator) -> Batch:
    """Tokens that count on from a random one."""
    tokens = torch.arange(TOKENS) + torch.randint(VOCABULARY - TOKENS, (SAMPLES, 1), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def images(generator: torch.Generator) -> Batch:
    """Noise, brighter for a higher class."""
    labels = torch.randint(8, (SAMPLES,), generator=generator)
    noise = torch.randn(SAMPLES, 3, 32, 32, generator=generator)
    return {"pixel_values": noise + labels.view(-1, 1, 1, 1) / 4, "labels": labels}


def make(model: str, config: str, shape: dict[str, Any]) -> nn.Module:
    """A model of transformers by the names of its class and its configuration's."""
    return getattr(transformers, model)(getattr(transformers, config)(**shape))


make_llama = partial(make, "LlamaForCausalLM", "LlamaConfig", DECODER)


def blocks_of(model: nn.Module) -> Iterable[nn.Module]:
    """The model's list of layers."""
    return max((module for module in model.modules() if isinstance(module, nn.ModuleList)), key=len)


def train(
    config: ZeroPPConfig | None,
    accumulation: int,
    steps: int,
    *,
    make_model: Callable[[], nn.Module] = make_llama,
    batch: Callable[[torch.Generator], Batch] = counting,
    prepare: Callable[[nn.Module], dict[str, Any]] = lambda model: {},
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    loss_scale: float | None = None,
    stance: str = "default",
) -> Trained:
    """Clips, and accumulates as FSDP2 wants it.

    prepare: makes the model ready for ``fully_shard``, and returns its options. loss_scale: what a GradScaler begins
    with; None = train without. stance: torch.compile's, of the optimizer's step.
    """
    torch.manual_seed(0)
    model: Any = make_model()
    trained = Trained(sum(parameter.numel() for parameter in model.parameters()))
    options = prepare(model)
    for block in blocks_of(model):
        fully_shard(block, **options)
    fully_shard(model, **options)
    zeropp = None if config is None else apply_zeropp(model, config)
    optimizer = make_optimizer(model.parameters(), lr=3e-3)
    has_scaler = loss_scale is not None
    scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale or 1.0, growth_interval=4, enabled=has_scaler)
    rank = options["mesh"].get_local_rank() if "mesh" in options else dist.get_rank()
    for step in range(steps):
        for i in range(accumulation):
            model.set_is_last_backward(i == accumulation - 1)
            generator = torch.Generator().manual_seed(1000 * (step * accumulation + i) + rank)
            torch.manual_seed(step * accumulation + i)  # dropout's
            loss = model(**batch(generator)).loss
            scaler.scale(loss / accumulation).backward()
            trained.losses.append(loss.item())
        scaler.unscale_(optimizer)
        clip(model, 1.0)
        with torch.compiler.set_stance(stance):
            scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        if zeropp is not None and scaler.get_scale() < scale:
            zeropp.undo_step()
        if zeropp is not None and scaler.get_scale() != scale:
            zeropp.rescale_errors(scaler.get_scale() / scale)
        optimizer.zero_grad()
        trained.end_step(zeropp)
    return trained


def clip(model: nn.Module, max_norm: float) -> None:
    """As ``clip_grad_norm_``, which takes parameters of one mesh alone; tensor parallelism leaves some of another."""
    meshes: dict[Any, list[Any]] = {}
    for parameter in model.parameters():
        meshes.setdefault(parameter.device_mesh, []).append(parameter)  # type: ignore[attr-defined]
    norms: list[Any] = [nn.utils.get_total_norm([p.grad for p in of_mesh]) for of_mesh in meshes.values()]
    total = torch.stack([norm.full_tensor() for norm in norms]).norm()
    for of_mesh in meshes.values():
        nn.utils.clip_grads_with_norm_(of_mesh, max_norm, total)


def on_a_tensor_parallel_mesh(model: nn.Module) -> dict[str, Any]:
    """Pairs of ranks share each matrix of the blocks, and what is left is sharded over the others."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in rows}
    for block in blocks_of(model):
        parallelize_module(block, mesh["tensor"], plan)
    return {"mesh": mesh["data"]}


def compile_blocks(model: nn.Module) -> dict[str, Any]:
    for block in blocks_of(model):
        block.compile(backend="aot_eager")  # traced, but no code made: that takes a minute for each rank
    return {}


def adamw_8bit(config: ZeroPPConfig | None, accumulation: int, steps: int) -> Trained:
    from torchao.optim import AdamW8bit

    # Its step is compiled, for each shape again: here it runs as it is written.
    return llama(config, accumulation, steps, make_optimizer=AdamW8bit, stance="force_eager")


llama = train
gpt2 = partial(train, make_model=partial(make, "GPT2LMHeadModel", "GPT2Config", GPT2))
mixtral = partial(
    train, make_model=partial(make, "MixtralForCausalLM", "MixtralConfig", DECODER | dict(num_local_experts=4))
)
qwen3 = partial(train, make_model=partial(make, "Qwen3ForCausalLM", "Qwen3Config", DECODER))
VIT = ENCODER | dict(image_size=32, patch_size=8, num_labels=8)
vit = partial(train, make_model=partial(make, "ViTForImageClassification", "ViTConfig", VIT), batch=images)
bert = partial(train, make_model=partial(make, "BertForMaskedLM", "BertConfig", ENCODER | dict(vocab_size=VOCABULARY)))
tensor_parallel = partial(llama, prepare=on_a_tensor_parallel_mesh)
cpu_offload = partial(llama, prepare=lambda _: {"offload_policy": CPUOffloadPolicy(pin_memory=False)})
FP16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
# Some steps overflow, and are skipped.
grad_scaler = partial(llama, prepare=lambda _: {"mp_policy": FP16}, loss_scale=2.0**21)
compiled = partial(llama, prepare=compile_blocks)
