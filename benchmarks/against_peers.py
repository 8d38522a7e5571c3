"""A race: one GPT, one loop, one network, and every way to train it, in turns, in the cluster in a box.

    sudo .venv/bin/python benchmarks/against_peers.py run  # makes build/peers with DeepSpeed first

All train the same model of torch's own modules in bf16 with fp32 masters and AdamW. One start of the program trains in
each cell in turn: micro-batches of a step, and rate of the links. The first turn has all ways, later ones some of them.
"Kept": the weights stay gathered from a step's first forward pass to its last backward pass, and gradients are reduced
once per step. Bytes are read from the nodes' interfaces, memory is the largest rank's peak. DeepSpeed's qwZ and qgZ run
with a quantizer in torch, Megatron-FSDP with streams and events that do nothing. gloo sends the gradients of a reduce-
scatter twice; "by NCCL" is a flat ring over the ranks, by formula.
"""

import itertools
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import deepspeed_quantizer
import torch
import torch.distributed as dist
import torch.nn.functional as F
from between_nodes import in_words
from cluster_in_a_box import check_requirements, cluster, measure_box, programs
from common import RESULTS, ROOT, append_row, markdown_table, read_rows, run_choice
from study import RESULTS as STUDY
from study import read_results
from study_tables import by_flags_and_seed, losses_of_recipe
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from megatron_zpp.models.bf16_products import prepare_products
from megatron_zpp.zeropp import ZeroPPConfig, apply_zeropp
from megatron_zpp.zeropp.recipes import find_config

PACKAGES = ["deepspeed==0.19.8", "megatron-fsdp==0.6.1"]
MEASURED, PEERS = RESULTS / "against_peers.jsonl", ROOT / "build" / "peers"
BOX = RESULTS / "against_peers_box.toml"  # the links and the processor, for what auto would choose
LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY = 8, 512, 8, 256, 1024
LAYOUTS = [(2, 2), (4, 1)]  # nodes, ranks of a node; the second for its bytes, once and without a limit
MEASURED_STEPS = {1: 3, 8: 1}  # by micro-batches of a step
RATES = [None, "1gbit", "100mbit"]
CELLS: list[tuple[int, str | None]] = list(itertools.product(MEASURED_STEPS, RATES))
SHOWN = list(itertools.product(reversed(RATES), MEASURED_STEPS))  # columns of the tables: the slowest links first
KEPT = ", kept"
# Bytes that leave a node per parameter and step of n micro-batches, of a flat ring over W = 4 ranks in 16 bit: a gather
# or reduce-scatter takes 2 (W - 1) / W = 1.5, an all-reduce between replicas on two nodes 2.
BY_NCCL = {
    "FSDP2": lambda n: 4.5 * n,
    "FSDP2, kept": lambda n: 3.0,
    "HSDP, kept": lambda n: 2.0,
    # DeepSpeed keeps up to 1e9 gathered parameters from a forward to its backward pass, so this model is gathered once
    # a micro-batch; hpZ gathers over all ranks in the first one of a step alone.
    "DeepSpeed ZeRO-3": lambda n: 3.0 * n,
    "DeepSpeed ZeRO-3, kept": lambda n: 1.5 * n + 1.5,
    "DeepSpeed ZeRO-3, hpZ": lambda n: 1.5 * n + 1.5,
    "DeepSpeed ZeRO++": lambda n: 0.25 * n + 0.75,  # without scales, and biases and norms, which it does not quantize
}
POWER_SGD = "DDP, PowerSGD of rank 4"
# Parameters sharded in a node, the optimizer over all ranks, one crossing in 16 bit each way per step: hybrid FSDP.
HIERARCHY = "hierarchy alone, kept"
MEGATRON_FSDP = ["Megatron-FSDP, HSDP", "Megatron-FSDP, HFSDP"]
DEEPSPEED_ZEROPP = "DeepSpeed ZeRO++"
# What a peer's settings add to the defaults that its function below names; benchmarks/peer_flags.py has tried others.
FLAGS: dict[str, dict[str, Any]] = {"DeepSpeed ZeRO-3, kept": {"stage3_param_persistence_threshold": 1e9}}
UNQUANTIZED: dict[str, Any] = dict(quantized_gradients=True, gradient_bits=None, gradient_intra_bits=None)
# Where the main thread's time goes: it computes, waits for a processor, waits for collectives. Then the other threads',
# which run gloo's collectives.
PARTS = ["computing", "ready", "blocked", "others"]
CARD = "int8 on each card, kept"  # every rank keeps all codes
OURS = ["lossless", "lossless, kept", "int8", "int8, kept", CARD, "int6", "int6, kept", "ternary", "ternary, kept"]
SETTINGS = [*BY_NCCL, *MEGATRON_FSDP, POWER_SGD, HIERARCHY, *OURS]
IN_EVERY_TURN = ["FSDP2, kept", "HSDP, kept", MEGATRON_FSDP[0], HIERARCHY, "lossless, kept", "int8, kept"]
SETTINGS_BY_TURN = [SETTINGS, *4 * [[*IN_EVERY_TURN, CARD, "int6, kept"]]]
# Only ratios count later turns, which have other settings and another speed of the machine.
SHOWN_TURNS = len(SETTINGS_BY_TURN)
SETTINGS_BY_TURN += 4 * [["DeepSpeed ZeRO-3, kept", POWER_SGD, *IN_EVERY_TURN, "int8"]]


class Layer(nn.TransformerEncoderLayer):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return super().forward(x, src_mask=mask, is_causal=True)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        shape: dict[str, Any] = dict(dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.ModuleList(Layer(WIDTH, HEADS, **shape) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of tokens [B, S + 1]."""
        x = self.embedding(tokens[:, :-1]) + self.positions(torch.arange(LENGTH))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens[:, 1:].flatten())


def train() -> None:
    """One rank: argv is train SETTING CELLS. The last rank prints a JSON line for each cell."""
    for row in measure(sys.argv[2], json.loads(sys.argv[3])):
        if dist.get_rank() == dist.get_world_size() - 1:
            print(json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def measure(setting: str, cells: list[tuple[int, str | None]]) -> Iterator[dict[str, Any]]:
    """Train in each cell. Yields a row of each: bytes are a mean over the nodes, memory is the largest rank's peak."""
    torch.manual_seed(0)
    prepare_products(torch.device("cpu"))
    model = GPT()
    n = sum(parameter.numel() for parameter in model.parameters())
    if setting.startswith("DeepSpeed"):
        train_step = deepspeed_step(model, setting)
    else:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        make = megatron_fsdp_step if setting in MEGATRON_FSDP else ddp_step if setting == POWER_SGD else fsdp_step
        train_step = make(model, setting)
    torch.manual_seed(dist.get_rank())
    is_first_of_node = os.environ["LOCAL_RANK"] == "0"
    nodes = dist.get_world_size() // int(os.environ["LOCAL_WORLD_SIZE"])

    def batches(micro_batches: int) -> list[Tensor]:
        return [torch.randint(VOCABULARY, (1, LENGTH + 1)) for _ in range(micro_batches)]

    def sent() -> float:
        """Read the bytes that have left a node, as a mean over the nodes."""
        added = torch.tensor(bytes_sent() / nodes if is_first_of_node else 0.0, dtype=torch.float64)
        dist.all_reduce(added)
        return added.item()

    trained_before = 0
    for micro_batches, rate in cells:
        if is_first_of_node:
            limit_link(rate)
        dist.barrier()
        if micro_batches != trained_before:  # the first steps allocate, and PowerSGD's are exact
            for _ in range(3 if trained_before == 0 else 1):
                train_step(batches(micro_batches))
            trained_before = micro_batches
        before, start = sent(), clocks()
        for _ in range(MEASURED_STEPS[micro_batches]):
            loss = train_step(batches(micro_batches))
        dist.barrier()
        seconds, *parts = ((clocks() - start) / MEASURED_STEPS[micro_batches]).tolist()
        row = {"micro_batches": micro_batches, "rate": rate, "seconds": seconds, "loss": loss}
        row |= dict(zip(PARTS, parts, strict=True))
        row["bytes_per_parameter"] = (sent() - before) / MEASURED_STEPS[micro_batches] / n
        peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        row["peak_mb"] = peak.item() / 1000
        yield row


def clocks() -> Tensor:
    """Return the time, and the PARTS of it in this thread and the process's others, in seconds."""
    running, ready = (int(ns) / 1e9 for ns in Path("/proc/thread-self/schedstat").read_text().split()[:2])
    now = time.monotonic()
    others = time.process_time() - time.thread_time()
    return torch.tensor([now, running, ready, now - running - ready, others], dtype=torch.float64)


def limit_link(rate: str | None) -> None:
    """Limit what this node sends, which on two nodes is all that the other receives."""
    subprocess.run(["tc", "qdisc", "del", "dev", "eth0", "root"], stderr=subprocess.DEVNULL, check=False)
    if rate is not None:
        subprocess.run(f"tc qdisc add dev eth0 root tbf rate {rate} burst 256kb latency 200ms".split(), check=True)


def bytes_sent() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def accumulating(
    model: nn.Module, optimizer: torch.optim.Optimizer, around: Callable[[bool], AbstractContextManager[object]]
) -> Callable[[list[Tensor]], float]:
    """Return a step over micro-batches, each in the context that ``around(is_last)`` returns."""

    def step(batches: list[Tensor]) -> float:
        for i, batch in enumerate(batches):
            with around(i == len(batches) - 1):
                loss = model(batch)
                (loss / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def fsdp_step(model: GPT, setting: str) -> Callable[[list[Tensor]], float]:
    mesh, ranks = None, int(os.environ["LOCAL_WORLD_SIZE"])
    if setting.startswith("HSDP"):
        shape = (dist.get_world_size() // ranks, ranks)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    is_kept = setting.endswith(KEPT)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    flags = {"layers_of_unit": 1, "prefetch": 1} | FLAGS.get(setting, {})
    layers, size, ahead = list(model.layers), flags["layers_of_unit"], flags["prefetch"]
    units: list[Any] = [layers[i : i + size] for i in range(0, LAYERS, size)] if size else []
    for unit in (*units, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=False if is_kept else None)
    if ahead > 1:
        for i, (unit, *_) in enumerate(units):
            unit.set_modules_to_forward_prefetch([other[0] for other in units[i + 1 : i + 1 + ahead]])
            unit.set_modules_to_backward_prefetch([other[0] for other in units[max(0, i - ahead) : i][::-1]])
    if setting == HIERARCHY:
        apply_zeropp(model, ZeroPPConfig(hpz_partition_size=ranks, **UNQUANTIZED))
    elif setting == CARD:
        apply_zeropp(model, replace(find_config("int8", ranks), weight_moves=True, weight_copies="card"))
    elif setting in OURS:
        apply_zeropp(model, setting.removesuffix(KEPT))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def around(is_last: bool) -> AbstractContextManager[object]:
        model.set_is_last_backward(is_last)  # type: ignore[operator]
        if is_kept:
            model.set_reshard_after_backward(is_last)  # type: ignore[operator]
            model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        return nullcontext()

    return accumulating(model, optimizer, around)


def ddp_step(model: GPT, setting: str) -> Callable[[list[Tensor]], float]:
    """PyTorch's compressed DDP, whose first steps are exact. In one bucket: gloo mixes up the hook's collectives."""
    dist._DEFAULT_FIRST_BUCKET_BYTES = 2**30  # type: ignore[attr-defined]
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=2**10)
    flags = {"matrix_approximation_rank": 4} | FLAGS.get(setting, {})
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, **flags)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    @contextmanager
    def around(is_last: bool) -> Iterator[None]:
        with nullcontext() if is_last else ddp.no_sync(), torch.autocast("cpu", torch.bfloat16):
            yield

    return accumulating(ddp, optimizer, around)


def megatron_fsdp_step(model: GPT, setting: str) -> Callable[[list[Tensor]], float]:
    """Megatron-FSDP on processors, where work is done when its call returns: streams and events do nothing."""

    class Nothing:
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: Nothing()

    cuda: Any = torch.cuda
    tensor: Any = Tensor
    cuda.Stream = cuda.Event = cuda.current_stream = Nothing
    cuda.stream, cuda.current_device = nullcontext, lambda: 0
    cuda.synchronize = cuda.empty_cache = lambda: None
    tensor.cuda = lambda self: self
    sys.modules["megatron.core"] = None  # type: ignore[assignment]  # it would take its own types from an older one
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer

    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    names = ("outer", "shard", "tensor")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // ranks, ranks, 1), mesh_dim_names=names)
    # Hybrid: parameters sharded in a node, the optimizer over all ranks. Else weights are kept between micro-batches.
    is_hybrid = setting.endswith("HFSDP")
    flags: dict[str, Any] = dict(
        dp_outer_dim="outer",
        dp_shard_dim="shard",
        tp_dim="tensor",
        hybrid_fsdp_group=mesh["outer", "shard"]._flatten("hybrid").get_group(),
        fsdp_unit_modules=[Layer],
        device=torch.device("cpu"),
        zero_dp_strategy="optim_grads_params" if is_hybrid else "optim_grads",
        outer_dp_sharding_strategy="optim" if is_hybrid else "no_shard",
        sync_model_each_microbatch=False,
        mixed_precision_policy=MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16, grad_comm_dtype=torch.bfloat16),
    )
    sharded = fully_shard_model(model.bfloat16(), device_mesh=mesh, **flags | FLAGS.get(setting, {}))
    optimizer = fully_shard_optimizer(torch.optim.AdamW(sharded.parameters(), lr=1e-4))

    return accumulating(sharded, optimizer, lambda is_last: sharded.sync() if is_last else sharded.no_sync())


def deepspeed_step(model: GPT, setting: str) -> Callable[[list[Tensor]], float]:
    import deepspeed

    flags = {"stage": 3, "overlap_comm": True}
    if setting.endswith(("hpZ", "ZeRO++")):
        flags |= {"zero_hpz_partition_size": int(os.environ["LOCAL_WORLD_SIZE"])}
    if setting == DEEPSPEED_ZEROPP:
        os.environ["LOCAL_SIZE"] = os.environ["LOCAL_WORLD_SIZE"]  # what its accelerator counts as a node's devices
        deepspeed_quantizer.install()
        flags |= {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": flags | FLAGS.get(setting, {}),
    }
    deepspeed.init_distributed("gloo")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(batches: list[Tensor]) -> float:
        engine.set_train_batch_size(len(batches) * dist.get_world_size())
        for batch in batches:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
        return float(loss.detach())

    return step


def prepare() -> None:
    """Go on with the Python of build/peers, which this makes, and build DeepSpeed's operator."""
    python = PEERS / "bin" / "python"
    if Path(sys.prefix) != PEERS:
        if not python.exists():
            venv.create(PEERS, with_pip=True)
            (path,) = (PEERS / "lib").glob("python*/site-packages")
            ours = next(entry for entry in sys.path if entry.endswith("site-packages"))
            (path / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
            subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        sys.exit(subprocess.run([python, *sys.argv]).returncode)
    check_requirements()
    os.environ |= {"TORCH_EXTENSIONS_DIR": str(PEERS / "extensions"), "DS_ACCELERATOR": "cpu"}
    # It compiles an operator at first, for which ranks that start together would wait for ever.
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29555"}
    build = "import deepspeed; deepspeed.init_distributed('gloo')"
    subprocess.run([python, "-c", build], check=True, env=os.environ | alone)


def run() -> None:
    """Measure what is missing: first where the links limit and in turns, then the bytes of four nodes."""
    vectors = torch.backends.cpu.get_cpu_capability()
    if others := {row["vectors"] for row in read_rows(MEASURED)} - {vectors}:
        sys.exit(
            f"error: {MEASURED} has rows of {others}, this processor has {vectors}: move them to results/old first"
        )
    prepare()
    if not BOX.exists():
        measure_box(BOX, *LAYOUTS[0], WIDTH, LENGTH)
    failed = []
    for (nodes, ranks), turn in itertools.product(LAYOUTS, range(len(SETTINGS_BY_TURN))):
        settings = SETTINGS_BY_TURN[turn] if turn == 0 or nodes == ranks else []
        cells = CELLS if nodes == ranks else [(n, None) for n in MEASURED_STEPS]
        for setting in settings if turn % 2 else reversed(settings):
            key = {"nodes": nodes, "setting": setting, "length": LENGTH, "turn": turn}
            done = [(row["micro_batches"], row["rate"]) for row in read_rows(MEASURED) if key.items() <= row.items()]
            if missing := [cell for cell in cells if cell not in done]:
                try:
                    rows = launch(setting, missing, nodes, ranks)
                except RuntimeError as error:  # Megatron-FSDP crashes at times
                    print(f"error: {error}", file=sys.stderr, flush=True)
                    failed.append(setting)
                    continue
                for row in rows:
                    append_row(MEASURED, {**key, **row})
                    print(setting, row, flush=True)
    if failed:
        sys.exit(f"error: {', '.join(failed)} failed: run this again to measure what is missing")


def launch(setting: str, cells: list[tuple[int, str | None]], nodes: int, ranks: int) -> list[dict[str, Any]]:
    """Start the ranks in a cluster of their own, and return what they printed."""
    words = [__file__, "train", setting, json.dumps(cells)]
    with cluster(nodes, None) as namespaces, programs(words, namespaces, ranks) as processes:
        printed, _ = processes[-1].communicate(timeout=1800)
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    if len(rows) != len(cells):
        raise RuntimeError(f"{setting}:\n{printed[-3000:]}")
    return rows


@cache
def kept_rows() -> list[dict[str, Any]]:
    return read_rows(MEASURED)


def rows_of(setting: str, nodes: int = 2, **where: Any) -> list[dict[str, Any]]:
    """Return the rows of the setting, turn by turn, for what ``where`` says of micro-batches and rate."""
    where |= {"nodes": nodes, "setting": setting, "length": LENGTH}
    return [row for row in kept_rows() if where.items() <= row.items()]


def figures(setting: str, name: str, nodes: int = 2, **where: Any) -> list[float]:
    """Return a figure of the setting, of each turn of ``SHOWN_TURNS``."""
    return [row[name] for row in rows_of(setting, nodes, **where) if row["turn"] < SHOWN_TURNS]


def ratios(setting: str, other: str, **where: Any) -> list[float]:
    """Return the seconds of a step over the other setting's, of each turn in which both ran."""
    ours, others = ({row["turn"]: row["seconds"] for row in rows_of(name, **where)} for name in (setting, other))
    return [ours[turn] / others[turn] for turn in ours.keys() & others.keys()]


def seconds(setting: str, **cell: Any) -> float:
    """Return a step's seconds: the median of int8 with kept weights, times the median ratio to it turn by turn."""
    base = statistics.median(figures("int8, kept", "seconds", **cell))
    return base * statistics.median(ratios(setting, "int8, kept", **cell))


def median_of_turns(values: Iterable[float]) -> str:
    """Format the median, and least to most if there are several; "" for none."""
    turns = sorted(values)
    span = f" ({turns[0]:.2f} to {turns[-1]:.2f})" if len(turns) > 1 else ""
    return f"{statistics.median(turns):.2f}{span}" if turns else ""


def table_of_turns(values: Callable[..., list[float]]) -> str:
    """Show each setting's values by turn in each cell: the median, and least to most."""
    lines = []
    for setting in SETTINGS:
        cells = (values(setting, rate=rate, micro_batches=n) for rate, n in SHOWN)
        lines.append([name_of(setting), *map(median_of_turns, cells)])
    return markdown_table(["", *(cell_name(*cell) for cell in SHOWN)], lines)


def table_of_seconds() -> str:
    """Seconds of a step."""
    return table_of_turns(partial(figures, name="seconds"))


def table_of_ratios() -> str:
    """Divide the seconds of a step by the seconds of `int8, kept` in the same turn."""
    return table_of_turns(partial(ratios, other="int8, kept"))


def table_of_bytes() -> str:
    """Bytes that leave a node per parameter and step, and the largest rank's peak memory."""
    lines = []
    for setting in SETTINGS:
        lines.append([name_of(setting)])
        for (nodes, _), n in itertools.product(LAYOUTS, MEASURED_STEPS):
            sent = figures(setting, "bytes_per_parameter", nodes, micro_batches=n)
            by_nccl = f" ({BY_NCCL[setting](n):.1f} by NCCL)" if setting in BY_NCCL and nodes == 2 else ""
            lines[-1].append(f"{statistics.median(sent):.2f}{by_nccl}" if sent else "")
        lines[-1].append(f"{max(peaks):.0f}" if (peaks := figures(setting, "peak_mb")) else "")
    headings = [f"{nodes} x {ranks}, {n}" for (nodes, ranks), n in itertools.product(LAYOUTS, MEASURED_STEPS)]
    return markdown_table(["", *headings, "peak MB"], lines)


def table_of_profile() -> str:
    """Where a step's seconds go on the last rank, at 1 Gbit/s with 8 micro-batches."""
    lines = []
    for setting in SETTINGS:
        parts = [statistics.median(figures(setting, part, rate="1gbit", micro_batches=8)) for part in PARTS]
        lines.append([name_of(setting), *(f"{seconds:.1f}" for seconds in parts)])
    return markdown_table(["", "computes", "ready, without a core", "waits", "its other threads compute"], lines)


def cell_name(rate: str | None, micro_batches: int) -> str:
    return f"{rate or 'no limit'}, {micro_batches}"


def name_of(setting: str) -> str:
    return f"`{setting}`" if setting in OURS and setting != CARD else setting


def readme_table() -> str:
    """The best peers beside two recipes, for 1 and for 8 micro-batches in a step; the loss."""
    columns = {"FSDP2, tuned": "FSDP2, kept", "HSDP": "HSDP, kept", "Megatron-FSDP's HSDP": MEGATRON_FSDP[0]}
    columns |= {"hybrid FSDP": HIERARCHY, "`int8`": "int8, kept", "`int6`": "int6, kept"}

    def pair(values: Iterable[float]) -> str:
        return " / ".join(f"{value:.2f}" for value in values)

    def sent(setting: str) -> Iterator[float]:
        return (statistics.median(figures(setting, "bytes_per_parameter", micro_batches=n)) for n in MEASURED_STEPS)

    lines = [["bytes that leave a node, per parameter and step", *(pair(sent(s)) for s in columns.values())]]
    for rate in reversed(RATES):
        lines.append([f"seconds per step, {'no limit' if rate is None else in_words(rate)}"])
        lines[-1] += [pair(seconds(s, rate=rate, micro_batches=n) for n in MEASURED_STEPS) for s in columns.values()]
    lines.append(["peak memory of a rank, MB"])
    lines[-1] += [f"{max(figures(setting, 'peak_mb')):.0f}" for setting in columns.values()]
    study = by_flags_and_seed(read_results(STUDY, "tuned"))
    for model, *losses in zip(
        ("GPT", "Llama"), *(losses_of_recipe(name, study) for name in ("int8", "int6")), strict=True
    ):
        lines.append([f"loss over bf16's, {model}", "", "", "", "", *losses])
    return markdown_table(["", *columns], lines)


def readme_prediction() -> str:
    worth = (RESULTS / "planner_worth.md").read_text()  # MFU and seconds of ZeRO-3, HSDP, lossless, int8, int6
    (llama,) = (line for line in worth.splitlines() if line.startswith("| Llama-8B | 8 | 100 |"))
    zero3, hsdp, _, int8, _ = re.findall(r"[\d.]+ s", llama)
    said = f"**Predicted, not measured**: on 8 nodes of 8 H100s at 100 Gbit/s, a step of a Llama-8B takes {int8} with"
    return f"{said}\n`int8`, {hsdp} with HSDP and {zero3} with ZeRO-3, each in its fastest layout."


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train()
    else:
        run_choice(__doc__, {"run": run})
