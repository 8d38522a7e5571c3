"""pretrain_gpt.py that also writes RECORD/ISLAND.RANK: each step's iteration, and digests of the rank's samples.

ISLAND is "all" without --island-number. From iteration INFINITE_FROM on, gradients are infinite.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

from megatron_zpp.commands.pretrain import main as program
from megatron_zpp.families import GPT
from megatron_zpp.training import pretrain


def main() -> None:
    words, take_step = sys.argv, pretrain.train_step
    island = words[words.index("--island-number") + 1] if "--island-number" in words else "all"
    infinite_from = int(os.environ.get("INFINITE_FROM", 10**9))
    file = Path(os.environ["RECORD"]) / f"{island}.{os.environ['RANK']}"

    def train_step(run, *arguments, **more):
        iteration = run.counters.iteration + 1
        if iteration == infinite_from:
            run.model.layers[0].register_forward_hook(
                lambda layer, inputs, output: output.register_hook(lambda gradient: gradient * float("inf")) and None
            )
        steps = take_step(run, *arguments, **more)
        samples = [row.numpy().tobytes() for batch in steps[0].micro_batches for row in batch["tokens"]]
        digests = [hashlib.sha256(sample).hexdigest() for sample in samples]
        with file.open("a") as record:
            record.write(json.dumps([iteration, digests]) + "\n")
        return steps

    pretrain.train_step = train_step
    program(GPT)


if __name__ == "__main__":
    main()
