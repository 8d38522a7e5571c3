"""What a rank does in each phase of a run, counted on real gloo ranks, and how that grows with their number.

    python benchmarks/scaling.py        # 4, 8, 16 and 32 ranks, in nodes of 2: about 8 GB of memory, some minutes

Counts, per rank, collectives, bytes that they put out, bytes of pickled objects among them, requests to the store,
barriers, printed lines, and groups with the connections that gloo makes for them. Each phase counts as it was the last
time; a first save makes a group.
"""

import contextlib
import io
import json
import math
import multiprocessing
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from common import RESULTS, append_row, markdown_table, new_parser, read_rows
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

from megatron_zpp.commands import pretrain as program
from megatron_zpp.families import GPT
from megatron_zpp.training import pretrain, setup
from megatron_zpp.training.callbacks import CheckpointManager
from megatron_zpp.training.evaluate import LossEvaluation
from megatron_zpp.training.reporter import Reporter

PATH = RESULTS / "scaling.jsonl"
WORLD_SIZES, EXTRAPOLATED, RANKS_PER_NODE = (4, 8, 16, 32), (1024, 16384), 2
FLAGS = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --mock-data "
    "--vocab-size 64 --lr 1e-3 --bf16 --num-workers 0 --zeropp int8 --eval-iters 1 --eval-interval 4 --log-interval 2 "
    "--save-interval 4 --lr-decay-style constant --no-async-save --exit-signal-handler"
)
COUNTED = (
    *("collectives", "bytes out", "bytes of objects", "requests to the store"),
    *("barriers", "lines", "groups", "connections"),
)
FIRST = "first save"
ITEM_BYTES = {"Byte": 1, "BFloat16": 2, "Float": 4, "Int": 4, "Long": 8, "Double": 8}
STORE = ("set", "get", "add", "compare_set", "delete_key", "append", "multi_get", "multi_set", "wait", "check")


class CountingStore(dist.Store):
    """A store that counts requests, C++'s too."""

    def __init__(self, store: dist.Store, count: Callable[[str, int], None]) -> None:
        super().__init__()
        self.store, self.count = store, count


def _counted(name: str) -> Callable[..., Any]:
    def request(self: CountingStore, *arguments: Any) -> Any:
        self.count("requests to the store", 1)
        return getattr(self.store, name)(*arguments)

    return request


for _name in STORE:
    setattr(CountingStore, _name, _counted(_name))


class Phases:
    """Counts of this rank, by phase: of the last time that each was there."""

    def __init__(self) -> None:
        self.output, self.recorded = io.StringIO(), 0
        self.begin()

    def begin(self) -> None:
        """Begin another run."""
        self.counts: dict[str, Counter[str]] = {}
        self.stack, self.groups = ["start"], set[str]()
        self.output.seek(0)
        self.output.truncate()

    def count(self, what: str, number: int) -> None:
        self.counts.setdefault(self.stack[-1], Counter())[what] += number

    def take(self) -> None:
        """Count for the current phase what was recorded since the last call."""
        entries = json.loads(_distributed_c10d._dump_fr_trace_json()).get("entries", [])  # type: ignore[attr-defined]
        for entry in entries:
            if entry["record_id"] >= self.recorded:
                self.recorded = entry["record_id"] + 1
                self.count("barriers" if entry["profiling_name"] == "gloo:barrier" else "collectives", 1)
                outputs = zip(entry["output_sizes"], entry["output_dtypes"], strict=True)
                self.count("bytes out", sum(math.prod(size) * ITEM_BYTES[dtype] for size, dtype in outputs))
        for group, name in distributed_c10d._world.pg_names.items():
            if name not in self.groups:
                self.groups.add(name)
                self.count("groups", 1)
                self.count("connections", group.size() - 1)
        self.count("lines", self.output.getvalue().count("\n"))
        self.output.seek(0)
        self.output.truncate()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.take()
        self.counts[name] = Counter()
        self.stack.append(name)
        yield
        self.take()
        self.stack.pop()

    def during(self, name: str, owner: Any, function: str) -> Any:
        """Patch a function of ``owner`` so that what happens in it is this phase's."""
        original = getattr(owner, function)

        def called(*arguments: Any, **options: Any) -> Any:
            is_first = f"first {name}" == FIRST and FIRST not in self.counts
            with self.phase(FIRST if is_first else name):
                return original(*arguments, **options)

        return patch.object(owner, function, called)


def count_rank(rank: int, world_size: int, port: int, folder: str, sender: Any) -> None:
    """Train, save, and load as one rank, and send what it counted."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank % RANKS_PER_NODE)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(RANKS_PER_NODE)}
    os.environ |= {"GROUP_RANK": str(rank // RANKS_PER_NODE), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCH_FR_BUFFER_SIZE": "100000"}
    phases = Phases()
    rendezvous, to_object = dist.rendezvous, distributed_c10d._tensor_to_object
    stores = []  # pybind forgets what Python overrides when the object is gone

    def counted_rendezvous(*arguments: Any, **options: Any) -> Iterator[tuple[dist.Store, int, int]]:
        store, *ranks = next(rendezvous(*arguments, **options))
        stores.append(CountingStore(store, phases.count))
        yield stores[-1], *ranks

    def counted_object(tensor: Any, size: Any, *arguments: Any) -> Any:
        phases.count("bytes of objects", int(size))
        return to_object(tensor, size, *arguments)

    def raised(error: BaseException) -> None:
        raise error

    with contextlib.ExitStack() as stack:
        for patched in (
            patch.object(dist, "rendezvous", counted_rendezvous),
            patch.object(distributed_c10d, "_tensor_to_object", counted_object),
            phases.during("load", setup, "checkpoint_to_load"),
            phases.during("load", setup, "_load"),
            phases.during("loop", program, "train"),
            phases.during("step", pretrain, "train_step"),
            phases.during("log", Reporter, "on_step"),
            phases.during("save", CheckpointManager, "on_save"),
            phases.during("evaluation", LossEvaluation, "on_evaluate"),
            patch.object(program.distributed, "die", raised),
            phases.during("exit", CheckpointManager, "on_end"),
            contextlib.redirect_stdout(phases.output),
            contextlib.redirect_stderr(phases.output),
        ):
            stack.enter_context(patched)
        for restart, iterations in enumerate((8, 16)):
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restart)  # as torchrun, which keeps one store
            phases.begin()
            sys.argv = [*f"pretrain {FLAGS} --train-iters {iterations} --save {folder} --load {folder}".split()]
            sys.argv += ["--global-batch-size", str(world_size)]
            try:
                program.pretrain(GPT)
            except SystemExit:
                print(phases.output.getvalue(), file=sys.__stderr__)
                raise
    phases.take()
    sender.send({phase: dict(counts) for phase, counts in phases.counts.items()})
    sender.close()


def count(world_size: int) -> list[dict[str, dict[str, int]]]:
    """Return what each rank counted."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["scaling", "torch._dynamo", "torch.distributed.checkpoint"])
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=20))
    with tempfile.TemporaryDirectory() as folder:
        pipes = []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            context.Process(
                target=count_rank, args=(rank, world_size, server.port, folder, sender), daemon=True
            ).start()
            sender.close()
            pipes.append(receiver)
        return [pipe.recv() for pipe in pipes]


def fit(world_sizes: Sequence[int], values: Sequence[float]) -> tuple[str, Callable[[float], float]]:
    """Return how values grow with the number of ranks, in the simplest way that fits within 5 %, and that function."""
    best: tuple[float, str, Callable[[float], float]] | None = None
    for name, of in (("constant", lambda w: 0.0 * w), ("log W", np.log2), ("W", lambda w: 1.0 * w)):
        columns = np.stack([np.ones(len(world_sizes)), of(np.array(world_sizes))], axis=1)
        (base, slope), *_ = np.linalg.lstsq(columns, np.array(values, float), rcond=None)
        function = lambda w, of=of, base=base, slope=slope: float(base + slope * of(w))  # noqa: E731
        error = max(abs(function(w) - value) / value for w, value in zip(world_sizes, values, strict=True))
        if best is None or error < best[0]:
            best = error, name, function
        if error <= 0.05:
            break
    assert best is not None
    return best[1:]


def tables() -> str:
    """Format the kept results: rank 0's counts with most ranks, and what grows."""
    counts: dict[str, dict[int, Any]] = {}
    for row in read_rows(PATH):
        counts.setdefault(row["code"], {})[row["ranks"]] = row["counts"]
    now, most = counts["now"], max(WORLD_SIZES)
    phases = [phase for phase in now[most]["other ranks"]]
    lines = [[p, *(f"{now[most]['rank 0'][p].get(c, 0):,}" for c in COUNTED)] for p in phases]
    fixed = markdown_table([f"with {most} ranks", *COUNTED], lines)
    grows = []
    for who in ("rank 0", "other ranks"):
        for phase in phases:
            for what in COUNTED:
                values = [now[w][who][phase].get(what, 0) for w in WORLD_SIZES]
                kind, function = fit(WORLD_SIZES, values) if any(values) else ("constant", float)
                if kind == "constant":
                    continue
                before = [counts["before"][w][who][phase].get(what, 0) for w in WORLD_SIZES]
                past = f"{fit(WORLD_SIZES, before)[1](EXTRAPOLATED[-1]):,.0f}" if before != values else "the same"
                more = [f"{function(w):,.0f}" for w in EXTRAPOLATED]
                grows.append([f"{phase}: {what}", who, *(f"{value:,}" for value in values), kind, *more, past])
    headings = ["what grows", "of", *WORLD_SIZES, "as", *(f"at {w:,}" for w in EXTRAPOLATED)]
    return f"{fixed}\n\n{markdown_table([*map(str, headings), 'before'], grows)}"


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--code", default="now", help="a name for the code that is measured; default now")
    args = parser.parse_args()
    for world_size in WORLD_SIZES:
        first, *others = count(world_size)
        # The most of any other rank: the last one prints the log.
        rest = {p: {c: max(rank[p].get(c, 0) for rank in others) for c in COUNTED} for p in first}
        row = {"code": args.code, "ranks": world_size, "counts": {"rank 0": first, "other ranks": rest}}
        append_row(PATH, row)


if __name__ == "__main__":
    main()
