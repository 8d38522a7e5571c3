"""A run as a job of Ray Train: each worker is a rank.

    python examples/launch/ray_train.py --workers 32 -- pretrain_llama.py FLAGS --save DIR --load DIR

Start it on a machine of the Ray cluster, from a folder that all machines share. Workers that fail end the run; with
--max-failures N, Ray starts all ranks again, which go on from the last checkpoint in --load.
"""

import argparse
import os
import socket
import subprocess
import sys

import ray
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(words: list[str], folder: str) -> None:
    """Start the program of this rank. Ray has set RANK and so on, and has made a process group to meet in."""
    where: list = [None]
    if dist.get_rank() == 0:
        with socket.socket() as any_port:
            any_port.bind(("", 0))
            where = [(ray.util.get_node_ip_address(), any_port.getsockname()[1])]
    dist.broadcast_object_list(where)  # the program makes a process group of its own, at an address of its own
    meeting = {"MASTER_ADDR": where[0][0], "MASTER_PORT": str(where[0][1])}
    subprocess.run([sys.executable, *words], cwd=folder, env=os.environ | meeting, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, required=True, help="ranks, each with a GPU if there are any")
    parser.add_argument("--cpus-per-worker", type=float, default=1)
    parser.add_argument("--max-failures", type=int, default=0)
    parser.add_argument("words", nargs=argparse.REMAINDER, help="-- PROGRAM FLAGS")
    args = parser.parse_args()
    words = [word for word in args.words if word != "--"]
    if not words:
        parser.error("give the program and its flags after --")
    if not words[0].startswith("-") and not os.path.isfile(words[0]):
        parser.error(f"there is no program {words[0]} here: start this from the folder that has it")
    with_gpus, folder = torch.cuda.is_available(), os.getcwd()
    trainer = TorchTrainer(
        lambda: train(words, folder),
        scaling_config=ScalingConfig(
            num_workers=args.workers,
            use_gpu=with_gpus,
            resources_per_worker={"CPU": args.cpus_per_worker, "GPU": with_gpus},
        ),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=args.max_failures)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
