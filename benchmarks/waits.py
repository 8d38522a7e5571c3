"""What it costs that the trainer always records how long ranks wait for links, in two ways.

    torchrun --nproc-per-node 4 benchmarks/waits.py > benchmarks/results/waits.json

First directly: the processor's time of one recorded wait, times the waits of a step, over the step's time. That says it
to a small fraction of a percent, also on a busy machine. Then in pairs: turns of a few steps of the same run with and
without recording, one after the other, by the clock and by the time of all ranks' processors. 2 nodes of 2 ranks with
all flags and LoCo, on a CPU with gloo.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from common import in_turns, new_parser, origin, seconds_of
from side_by_side import OurTraining, our_run

from megatron_zpp.families import GPT
from megatron_zpp.parallel.distributed import init_distributed
from megatron_zpp.training.trainer import Trainer
from megatron_zpp.zeropp.fsdp.waits import Waits

LAYERS, HIDDEN, HEADS, LENGTH, BATCH, VOCAB = 2, 128, 2, 128, 8, 2048  # the quickstart's
FLAGS = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS} --seq-length {LENGTH} --bf16 "
    "--num-workers 0 --zero-quantized-weights --zero-quantized-gradients --zero-hpz-partition-size 2 --zeropp-loco"
)
REPEATS = 20_000


def turns(training: OurTraining, rounds: int, steps: int) -> dict[bool, list[tuple[float, float]]]:
    """Seconds per step, and of all ranks' processors, of each turn, by whether waits were recorded."""

    def turn() -> tuple[float, float]:
        dist.barrier()
        begin, begin_of_processor = time.perf_counter(), time.process_time()
        training.steps(steps)
        times = torch.tensor([time.perf_counter() - begin, time.process_time() - begin_of_processor]).double()
        dist.all_reduce(times)
        return float(times[0]) / dist.get_world_size() / steps, float(times[1]) / steps

    def turn_without() -> tuple[float, float]:
        with patch.multiple(Waits, collective=lambda *_, **__: nullcontext(), take=lambda _: (0.0, 0.0)):
            return turn()

    return in_turns({True: turn, False: turn_without}, rounds)


def recorded_waits(training: OurTraining, steps: int) -> float:
    """How many this rank records per step."""
    with patch.object(Waits, "collective", autospec=True, side_effect=Waits.collective) as recorded:
        training.steps(steps)
    return recorded.call_count / steps


def seconds_of_a_wait(run: Trainer) -> float:
    """The processor's, with its part of ``take``."""
    assert run.zeropp is not None
    waits, unit = Waits(run.device), run.zeropp.units[0]  # type: ignore[attr-defined]

    def timed(body: Callable[[], Any]) -> float:
        def repeated() -> None:
            for i in range(REPEATS):
                body()
                if i % 50 == 0:
                    waits.take()

        return seconds_of(repeated, time.process_time) / REPEATS

    def wait() -> None:
        with waits.collective("gather", unit, crosses_nodes=True):
            pass

    waits.take()
    return min(timed(wait) - timed(lambda: None) for _ in range(5))


def spread(ratios: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"median": round(middle, 4), "lower quartile": round(low, 4), "upper quartile": round(high, 4)}


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=40, metavar="N", help="pairs of turns; default 40")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="optimizer steps of a turn; default 4")
    args = parser.parse_args()
    device = init_distributed("gloo", 10)
    num_steps = (2 * args.rounds + 4) * args.steps
    with tempfile.TemporaryDirectory() as folder:
        training = OurTraining(our_run(GPT, folder, FLAGS, device, VOCAB, BATCH, num_steps, log_interval=args.steps))
        pairs = turns(training, args.rounds, args.steps)
        waits_per_step = recorded_waits(training, args.steps)
        wait_seconds = seconds_of_a_wait(training.run)
    step_seconds = statistics.median(clock for clock, _ in pairs[False])
    ratios = [[with_[i] / without[i] for with_, without in zip(pairs[True], pairs[False], strict=True)] for i in (0, 1)]
    result = {
        "model": f"GPT: {LAYERS} layers, hidden {HIDDEN}, vocabulary {VOCAB}; {BATCH} x {LENGTH} tokens a rank",
        **origin(),
        "milliseconds per step": round(1000 * step_seconds, 1),
        "waits per step and rank": waits_per_step,
        "microseconds per wait": round(1e6 * wait_seconds, 2),
        "share of a step": wait_seconds * waits_per_step / step_seconds,
        "pairs": args.rounds,
        "time with over without, by the clock": spread(ratios[0]),
        "time with over without, of processors": spread(ratios[1]),
    }
    if dist.get_rank() == 0:
        print(json.dumps(result, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
