"""What one step of the trainer asks of a GPU: launches, host waits, collectives and communicators, counted without one.

    .venv/bin/python benchmarks/launches.py  # some minutes; adds to benchmarks/results/launches.jsonl
    examples/reproduce.sh --write            # the kept results into docs/evidence/scaling.md

One rank of 64 nodes of 8 takes three steps of one micro-batch on fake tensors, which have shapes and no values
(tests/zeropp/order). The third is counted: the first gathers weights in full, and the second copies tables of moved
codes to the device, once in a run.
"""

import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import RESULTS, ROOT, markdown_table, measure_once, new_parser, read_rows
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.checkpoint.meta import Counters
from megatron_zpp.families import LLAMA
from megatron_zpp.optim.batch_size import BatchSchedule
from megatron_zpp.optim.gradients import LossScaler
from megatron_zpp.optim.optimizer import build_optimizer
from megatron_zpp.parallel import experts as experts_module
from megatron_zpp.parallel.mesh import Mesh
from megatron_zpp.parallel.sharding import mixed_precision, offloading, shard_model
from megatron_zpp.training.loss import LanguageModelLoss
from megatron_zpp.training.step import train_step
from megatron_zpp.training.trainer import Trainer
from megatron_zpp.zeropp import Traffic, apply_zeropp
from megatron_zpp.zeropp.fsdp import topology
from megatron_zpp.zeropp.recipes import RECIPES
from megatron_zpp.zeropp.wire.format import wire_format

sys.path.append(str(ROOT))
from tests.zeropp.order.fake_cuda import CUDA, fake_cuda
from tests.zeropp.order.host import Host, Launches

PATH = RESULTS / "launches.jsonl"
NODES, PER_NODE, RANK, STEPS = 64, 8, 5, 3
COMMON = (
    f"--mock-data --micro-batch-size 1 --global-batch-size {NODES * PER_NODE} --train-iters {STEPS} "
    f"--lr 1e-4 --bf16 --zeropp-ranks-per-node {PER_NODE}"
)
ZEROPP = "--zero-quantized-weights --zero-quantized-gradients --zero-hpz-partition-size 8 --zeropp-loco"
EXPERTS = "--preset qwen3-30b-a3b --vocab-size 151936"
MODELS = {
    "Llama 3 8B": "--preset llama-8b --vocab-size 128256",
    "Qwen3 30B-A3B": EXPERTS,
    "the same, capacity 1.25": f"{EXPERTS} --moe-expert-capacity-factor 1.25",
    "the same, experts divided among 8": f"{EXPERTS} --expert-model-parallel-size 8",
    "divided, capacity 1.25": f"{EXPERTS} --expert-model-parallel-size 8 --moe-expert-capacity-factor 1.25",
}
CASES = [
    *(("Llama 3 8B", recipe) for recipe in ("zero3", "ZeRO++", *list(RECIPES)[1:])),
    *((model, "zero3") for model in list(MODELS)[1:]),
    ("the same, experts divided among 8", "int8"),
]
COUNTED = ("launches", "host waits", "collectives", "between nodes", "communicators")


def flags_of(model: str, recipe: str) -> str:
    return f"{COMMON} {MODELS[model]} {f'--zeropp {recipe}' if recipe in RECIPES else ZEROPP}"


def count(flags: str) -> dict[str, int]:
    """Count what one step launches, and what its host waits for. On a process without a process group."""
    settings = parse_settings(LLAMA, flags.split(), NODES * PER_NODE, note=lambda text: None)
    experts, length = settings.distributed.expert_model_parallel_size, settings.training.seq_length
    dist.init_process_group("fake", rank=RANK, world_size=NODES * PER_NODE, store=FakeStore())
    wire_format.cache_clear()  # formats hold tables of another count's fake tensors
    mesh = Mesh("cuda", expert_parallel=experts)
    concatenate = staticmethod(_disable_current_modes()(DeviceMesh._concatenate))  # it has rank numbers in tensors
    assert settings.tokenizer.vocab_size is not None
    with fake_cuda(), Host() as host, Launches() as made, ExitStack() as patches:
        with CUDA:
            model = LLAMA.module(LLAMA.build_config(settings.model, settings.tokenizer.vocab_size))
        if experts > 1:
            with _disable_current_modes():  # ranks tell each other where they are, in tensors with values
                experts_module.apply_expert_parallelism(model, mesh, PER_NODE, None, Traffic())
        patches.enter_context(patch.object(DeviceMesh, "_concatenate", concatenate))
        shard_model(model, mesh, 3, mixed_precision(settings.precision), offloading(settings.zero, CUDA)[0])
        patches.enter_context(patch.object(topology, "_runs_in_order", lambda group: True))  # as NCCL's do
        with _disable_current_modes():
            zeropp = apply_zeropp(model, settings.zeropp)
        optimizer = build_optimizer(model, settings.optimizer, zeropp)
        run = object.__new__(Trainer)  # without data, a schedule and a log
        run.batches, run.counters = BatchSchedule.from_settings(settings.training, NODES * PER_NODE), Counters()
        run.settings, run.device, run.mesh, run.loss = settings, CUDA, mesh, LanguageModelLoss(mesh, CUDA)
        run.model, run.pipeline, run.copies, run.curriculum = model, None, (), None
        run.optimizer, run.scaler = optimizer, LossScaler(settings.precision)
        run.zeropp = zeropp
        patches.enter_context(patch.object(Trainer, "set_learning_rate", lambda run: None))
        tokens = torch.zeros(1, length, dtype=torch.int64, device=CUDA)
        batch = {"tokens": tokens, "labels": tokens, "loss_mask": torch.ones(1, length, device=CUDA)}

        def answer(tensor: FakeTensor) -> Sequence[float]:
            """Answer the host: the numbers of a step, bytes of moved codes (a fourth), or even shares of tokens."""
            host.waits.append("tolist")  # also of what a copy to host memory brings
            if tensor.is_floating_point():
                return [1.0] * tensor.numel()
            if tensor.dtype == torch.int32:
                return [unit.whole.numel // 4 for unit in zeropp.units][: tensor.numel()]
            rows = length * settings.model.router_topk
            return [rows, *[rows // experts] * (tensor.numel() - 1)]

        attend = torch.ops.aten._scaled_dot_product_flash_attention  # as on a GPU; torch's C++ is told "meta"
        for owner, name, replacement in (
            (FakeTensor, "tolist", answer),
            (experts_module, "_disable_current_modes", nullcontext),
            (F, "scaled_dot_product_attention", lambda q, k, v, *_, **__: attend(q, k, v, is_causal=True)[0]),
        ):
            patches.enter_context(patch.object(owner, name, replacement))
        for _ in range(STEPS):
            made.launches = 0
            made.groups.clear()
            host.waits.clear()
            train_step(run, iter([batch]), 1, stop=False)
    nodes = [{rank // PER_NODE for rank in dist.get_process_group_ranks(group)} for group in made.groups]
    crossing = sum(len(each) > 1 for each in nodes)
    # The ranks of each unit told each other their nodes at the start.
    communicators = {*made.groups, *(each.group for each in zeropp.topologies if each.world_size > 1)}
    counts = made.launches, len(host.waits), len(nodes), crossing, len(communicators)
    dist.destroy_process_group()
    return dict(zip(COUNTED, counts, strict=True))


def table() -> str:
    kept = {(row["code"], row["model"], row["recipe"]): row["counts"] for row in read_rows(PATH)}
    lines = []
    for model, recipe in (case for case in CASES if ("now", *case) in kept):
        now = kept["now", model, recipe]
        before = kept.get(("before", model, recipe), now)
        cells = (f"{now[what]:,}" + (f" ({before[what]:,})" if now != before else "") for what in COUNTED)
        lines.append([model, f"`{recipe}`", *cells])
    return markdown_table(["model", "recipe", *COUNTED], lines)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--code", default="now", help="a name for the code that is counted; default now")
    args = parser.parse_args()
    for model, recipe in CASES:
        key = dict(code=args.code, model=model, recipe=recipe)
        measure_once(PATH, key, partial(lambda flags: {"counts": count(flags)}, flags_of(model, recipe)))


if __name__ == "__main__":
    main()
