"""The blocked cross entropy, forward and backward: operators launched, peak memory, seconds of CPU.

    python benchmarks/loss.py                                      # operators one by one
    python benchmarks/loss.py --compiled                           # as with --compile
    PYTHONPATH=../before python benchmarks/loss.py --name before   # of another checkout

Appends a row to results/loss.jsonl. Views are no launches. Memory is what the passes allocate at most, the gradients
included. Seconds of CPU are the least of five turns, on one thread, since waiting threads would count.
"""

import functools
import time
from typing import Any

import torch
from common import RESULTS, append_row, markdown_table, new_parser, read_rows
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megatron_zpp.models import layers


class Launches(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--name", default="now")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=131072)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(args.tokens, args.hidden_size).to(dtype).requires_grad_()
    weight = (torch.randn(args.vocabulary, args.hidden_size) * args.hidden_size**-0.5).to(dtype).requires_grad_()
    labels, grad = torch.randint(args.vocabulary, (args.tokens,)), torch.rand(args.tokens)
    options = {"compiled": True} if args.compiled else {}

    def both_passes() -> tuple[float, float]:
        hidden.grad = weight.grad = None
        start = time.process_time()
        loss = layers.linear_cross_entropy(hidden, weight, labels, **options)
        between = time.process_time()
        loss.backward(grad)
        return between - start, time.process_time() - between

    both_passes()  # compiles
    turns = [both_passes() for _ in range(5)]
    row = vars(args) | {"forward": min(f for f, _ in turns), "backward": min(b for _, b in turns)}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        both_passes()
    row["peak_mib"] = peak_bytes(recorded) / 2**20
    with Launches() as launches:
        if args.compiled:  # dispatch modes do not see compiled kernels; each body is one
            layers._compiled = functools.partial(as_one_kernel, launches)  # type: ignore[assignment]
        both_passes()
    row["launches"] = launches.count
    print(row)
    append_row(RESULTS / "loss.jsonl", row)


def table() -> str:
    """The kept results of a hidden size of 512: the least of all turns."""
    rows = [row for row in read_rows(RESULTS / "loss.jsonl") if row["hidden_size"] == 512]
    lines = []
    ways = {"before": ("before", False), "operators one by one": ("now", False), "with `--compile`": ("now", True)}
    for way, key in ways.items():
        of_way = [row for row in rows if (row["name"], row["compiled"]) == key]
        seconds = (f"{min(row[part] for row in of_way):.3f}" for part in ("forward", "backward"))
        lines.append([way, f"{of_way[0]['launches']:,}", f"{of_way[0]['peak_mib']:.1f}", *seconds])
    return markdown_table(["", "launches", "peak memory, MiB", "forward, s", "backward, s"], lines)


def as_one_kernel(launches: Launches, body: Any) -> Any:
    def run(*arguments: Any) -> Any:
        launches.count += 1
        with _disable_current_modes():
            return body(*arguments)

    return run


def peak_bytes(recorded: Any) -> int:
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


if __name__ == "__main__":
    main()
