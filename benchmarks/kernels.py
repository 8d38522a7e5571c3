"""Bytes per second of every quantization kernel, as a share of a copy's in the same run, and beside plain torch.

    python benchmarks/kernels.py [--device cuda] [--megabytes 64 1] [--threads 1 2] [--output kernels.json]

Tensors of 1 GB on a GPU, and of 64 MB on a CPU, fit no cache, and a kernel takes longer than its launch. Bytes are what
a kernel must read and write once: its inputs and outputs. The measure is a copy of as many bytes, in turns with the
kernel. Plain torch is megatron_zpp/zeropp/wire/reference.py.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from common import RESULTS, markdown_table, new_parser, origin, seconds_of
from torch import Tensor

from megatron_zpp.zeropp.wire import kernels, moves, reference
from megatron_zpp.zeropp.wire.format import WireFormat
from megatron_zpp.zeropp.wire.layout import Compensation, ParameterShard

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
FORMATS = [(8, 256), (6, 256), (4, 128), (2, 128)]  # bits and block: the last by mean |x|, the others by the largest
PEERS = 4
MEASURED = RESULTS / "kernels_cpu.json"  # main() writes it: --megabytes 64 1 --threads 1
PLAIN_ROUNDS = 2  # rounds of plain torch, at most: it is many times slower than the kernels


@dataclass
class Kernel:
    """One kernel on tensors of its own: what it does, the bytes it must move, and the same in plain torch."""

    name: str
    nbytes: int
    run: Callable[[], object]
    plain: Callable[[], object]


def weight_format(numel: int, bits: int | None, block_size: int, dtype: torch.dtype) -> WireFormat:
    return WireFormat([ParameterShard("weight", numel, True)], bits, block_size, dtype)


def kernels_on(device: torch.device, megabytes: int) -> Iterator[Kernel]:
    """All kernels, each with tensors of about so many MB of values."""
    for dtype, label in DTYPES.items():
        numel = megabytes * 2**20 // dtype.itemsize
        values = torch.randn(numel, device=device).to(dtype)
        for bits, block_size in FORMATS:
            format = weight_format(numel, bits, block_size, dtype)
            yield from encode_and_decode(f"{label}, int{bits}/{block_size}", format, values)
        yield from moved_codes(f"{label}, int8/256", weight_format(numel, 8, 256, dtype), values)
        yield permuted(f"{label}, int8/128", values)
    yield from reductions(device, megabytes * 2**20 // 4)


def encode_and_decode(what: str, format: WireFormat, values: Tensor) -> Iterator[Kernel]:
    wire, out = format.encode(values), torch.empty_like(values)
    expected = torch.empty_like(wire)
    nbytes = values.nbytes + wire.nbytes
    yield Kernel(
        f"quantize {what}",
        nbytes,
        lambda: format.encode(values, out=wire),
        lambda: reference.encode(format, values, expected, None, None, None),
    )
    yield Kernel(
        f"dequantize {what}",
        nbytes,
        lambda: format.decode(wire, out),
        lambda: reference.decode(format, wire.unsqueeze(0), out, False),
    )


def permuted(what: str, values: Tensor) -> Kernel:
    """qgZ's first hop: [N, P, L] is encoded as [P, N, L]."""
    gradients = values.view(2, 4, -1)
    format = weight_format(gradients.size(-1), 8, 128, values.dtype)
    wire = format.encode(gradients.transpose(0, 1))
    expected = torch.empty_like(wire)
    return Kernel(
        f"quantize permuted {what}",
        values.nbytes + expected.nbytes,
        lambda: format.encode(gradients.transpose(0, 1), out=wire),
        lambda: reference.encode(format, gradients.transpose(0, 1), expected, None, None, None),
    )


def moved_codes(what: str, format: WireFormat, values: Tensor) -> Iterator[Kernel]:
    old = format.encode(values, keeps_scales=True, kept=None)
    new = format.encode(values * (1 + 2e-3 * torch.randn_like(values)), keeps_scales=True, kept=old)
    sent, arrived = moves.encode_moves(format, old, new), old.clone()

    def plain(call: Callable[[], object]) -> None:
        with patch.object(moves, "_has_kernels", lambda *_: False):
            call()

    def encode() -> Tensor:
        return moves.encode_moves(format, old, new)

    def apply() -> Tensor:
        return moves.apply_moves(format, arrived.copy_(old)[None], sent[None])

    yield Kernel(f"encode moves {what}", old.nbytes + new.nbytes + sent.nbytes, encode, lambda: plain(encode))
    yield Kernel(f"apply moves {what}", 3 * old.nbytes + sent.nbytes, apply, lambda: plain(apply))


def reductions(device: torch.device, numel: int) -> Iterator[Kernel]:
    """What happens to gradients between the hops and after them; ``numel`` fp32 values."""
    intra, inter = (weight_format(numel, bits, 128, torch.bfloat16) for bits in (8, 4))
    errors = weight_format(numel, 8, 128, torch.float32)
    gradients = torch.randn(numel, device=device)
    total, expected_total = torch.empty_like(gradients), torch.empty_like(gradients)
    error = errors.encode(torch.randn(numel, device=device) * 0.01)
    wire, new_error = inter.encode(gradients), torch.empty_like(error)
    compensation = Compensation(errors, error, new_error, 0.8, 1.0)
    yield from scaled(gradients, compensation)
    for format, bits in [(intra, 8), (inter, 4)]:
        peers = torch.stack([format.encode(torch.randn(numel, device=device)) for _ in range(PEERS)])
        yield Kernel(
            f"dequantize and add {PEERS} peers, int{bits}/128",
            peers.nbytes + total.nbytes,
            partial(format.decode_sum, peers, total),
            partial(reference.decode, format, peers, expected_total, False),
        )
    yield Kernel(
        "LoCo: compensate, quantize, move the error, fp32, int4/128",
        gradients.nbytes + wire.nbytes + 2 * error.nbytes,
        lambda: inter.encode(gradients, compensation=compensation, out=wire),
        lambda: reference.encode(inter, gradients, wire, None, compensation, None),
    )
    peers = torch.stack([intra.encode(torch.randn(numel, device=device)) for _ in range(PEERS)])

    def in_plain_torch() -> None:
        reference.decode(intra, peers, expected_total, False)
        reference.encode(inter, expected_total, wire, None, compensation, None)

    yield Kernel(
        f"add {PEERS} peers int8, LoCo, quantize int4/128",
        peers.nbytes + wire.nbytes + 2 * error.nbytes,
        lambda: inter.encode_sum(peers, intra, compensation=compensation, out=wire),
        in_plain_torch,
    )
    yield Kernel(
        "Hadamard rotation, fp32",
        gradients.nbytes + total.nbytes,
        lambda: inter.rotate(gradients),
        lambda: reference.rotate(inter, gradients, expected_total),
    )


def scaled(gradients: Tensor, compensation: Compensation) -> Iterator[Kernel]:
    """Scales of elements around 2-bit codes, with LoCo: the default recipe's hop between two nodes."""
    numel, device = gradients.numel(), gradients.device
    format = weight_format(numel, 2, 128, torch.float32)
    exponents = torch.randint(0, 100, (2, numel), dtype=torch.uint8, device=device)
    wire, total, expected = format.encode(gradients), torch.empty_like(gradients), torch.empty_like(gradients)
    error, wires = compensation.error, torch.stack([wire, wire])
    assert error is not None
    moves, moved = [-1, 0, 1, 2, 3], torch.empty_like(exponents)
    yield Kernel(
        "LoCo, scales of elements, quantize fp32, int2/128",
        gradients.nbytes + exponents[0].nbytes + wire.nbytes + 2 * error.nbytes,
        lambda: format.encode(gradients, compensation=compensation, exponents=exponents[0], out=wire),
        lambda: reference.encode(format, gradients, wire, None, compensation, None, exponents=exponents[0]),
    )
    yield Kernel(
        "dequantize and add 2 peers, scales of elements, int2/128",
        wires.nbytes + exponents.nbytes + total.nbytes,
        lambda: format.decode_sum(wires, total, exponents=exponents),
        lambda: reference.decode(format, wires, expected, False, exponents),
    )
    yield Kernel(
        "move the scales of elements, int2/128",
        wires.nbytes + 2 * exponents.nbytes,
        lambda: format.move_exponents(exponents, wires, moves),
        lambda: reference.move_exponents(format, exponents, wires, moves, moved),
    )


def seconds_on(device: torch.device, run: Callable[[], object], repeat: int) -> float:
    """The time of one run; of the mean of ``repeat`` runs on a GPU."""
    if device.type == "cpu":
        return seconds_of(run)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeat):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeat


def measure(kernel: Kernel, device: torch.device, rounds: int, beside: Sequence[str]) -> dict[str, float]:
    """Seconds of the fastest round, in turns with a copy of as many bytes: what else runs only slows a round down."""
    source = torch.empty(kernel.nbytes // 2, dtype=torch.uint8, device=device)
    source.random_()
    target = torch.empty_like(source)
    runs: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(source), "kernel": kernel.run}
    if "plain" in beside:
        runs["plain"] = kernel.plain
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()  # warm up
    for turn in range(rounds):
        for name, run in runs.items():
            if name != "plain" or turn < PLAIN_ROUNDS:
                times[name].append(seconds_on(device, run, repeat=1 if name == "plain" else 20))
    return {name: min(seconds) for name, seconds in times.items()}


def table() -> str:
    """The kept results of one thread: 64 MB of values, and 1 MB, which stay in the cache."""
    rows = {(row["megabytes"], row["kernel"]): row for row in json.loads(MEASURED.read_text())["kernels"]}
    lines = []
    for kernel in [kernel for megabytes, kernel in rows if megabytes == 64]:
        large, small = rows[64, kernel], rows[1, kernel]
        of_memory = large["gigabytes_per_second"] / large["of_a_copy"]  # GB/s of the copy beside it
        roof = small["gigabytes_per_second"] / of_memory
        cells = [f"{large['gigabytes_per_second']:.1f}", f"{large['of_a_copy']:.0%}", f"{roof:.0%}"]
        lines.append([kernel, *cells, f"{large['times_plain']:.0f} x"])
    return markdown_table(("kernel, one thread", "GB/s", "of a copy", "roof", "over plain torch"), lines)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--megabytes", type=int, nargs="+", help="of values in a tensor; default 1024 on a GPU, 64 on a CPU"
    )
    parser.add_argument("--threads", type=int, nargs="+", help="on a CPU; default 1 and all")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--beside", nargs="*", choices=["plain"], default=["plain"], help="plain torch")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results there as JSON")
    args = parser.parse_args()
    device = torch.device(args.device)
    reason = kernels.why_not_on(device)
    if reason is not None:
        parser.error(f"there are no kernels to measure: {reason}")
    all_threads = sorted({1, os.cpu_count() or 1})
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()

    rows = []
    for threads in (args.threads or all_threads) if device.type == "cpu" else [1]:
        torch.set_num_threads(threads)
        for megabytes in args.megabytes or [1024 if device.type == "cuda" else 64]:
            where = hardware if device.type == "cuda" else f"{threads} thread{'s' if threads > 1 else ''}, {hardware}"
            print(f"\n{megabytes} MB of values, {where}\n")
            others = "".join(f" {f'x {other}':>10}" for other in args.beside)
            print(f"{'kernel':58} {'GB/s':>8} {'of a copy':>9}{others}")
            for kernel in kernels_on(device, megabytes):
                seconds = measure(kernel, device, args.rounds, args.beside)
                row = {
                    "kernel": kernel.name,
                    "hardware": hardware,
                    "threads": threads if device.type == "cpu" else None,
                    "megabytes": megabytes,
                    "gigabytes_per_second": kernel.nbytes / seconds["kernel"] / 1e9,
                    "of_a_copy": seconds["copy"] / seconds["kernel"],
                    **{f"times_{other}": seconds[other] / seconds["kernel"] for other in seconds if other != "kernel"},
                }
                rows.append(row)
                others = "".join(f" {row[f'times_{other}']:10.1f}" for other in args.beside)
                print(
                    f"{kernel.name:58} {row['gigabytes_per_second']:8.1f} {row['of_a_copy']:9.0%}{others}", flush=True
                )
    if args.output is not None:
        result = {**origin(), "kernels": rows}
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
