"""``plan --measure``: measure a cluster, on all of its ranks at once, as a run uses them: arithmetic, kernels, links.

To plan for another number of nodes, edit the file that this writes.
"""

import argparse
import os
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_zpp.errors import reports_errors
from megatron_zpp.parallel.distributed import init_distributed, is_first_rank, wait_for_all_ranks
from megatron_zpp.planning.cluster import write_cluster
from megatron_zpp.planning.measure import Options, measure_cluster
from megatron_zpp.settings.flags import local_path, number


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure a cluster, under torchrun.", allow_abbrev=False)
    add, count = parser.add_argument, number(int, at_least=1)
    width, tokens = number(int, at_least=64), number(int, at_least=16)
    add("--output", type=local_path(Path), required=True, metavar="FILE", help="cluster file, for tools/plan.py")
    add("--hidden-size", type=width, metavar="H", help="width; default 4096, or 512 on a CPU")
    add("--tokens", type=tokens, metavar="N", help="tokens of a micro-batch; default 4096, or 512 on a CPU")
    add("--ranks-per-node", type=count, metavar="P", help="ranks of a node; default as they run")
    return parser.parse_args(argv)


@reports_errors
def main() -> None:
    args = parse_arguments()
    if "RANK" not in os.environ:
        raise ValueError("plan --measure needs its ranks: start it under torchrun, on all nodes")
    if is_first_rank():
        args.output.open("a").close()  # raises before the minutes of measuring
        print("measuring, for some minutes", flush=True)
    device = init_distributed(None, 10)
    usual = 4096 if device.type == "cuda" else 512
    options = Options(device, args.hidden_size or usual, args.tokens or usual)
    cluster = measure_cluster(args.ranks_per_node, options)
    if dist.get_rank() == 0:
        comment = f"Measured on {date.today()} with torch {torch.__version__} over {dist.get_backend()}: hidden size "
        write_cluster(args.output, cluster, f"{comment}{options.hidden_size}, {options.tokens} tokens.")
        rates, *_ = args.output.read_text().partition("[collective_seconds")
        print(f"{rates}written, with the seconds of collectives by size: {args.output}", flush=True)
    wait_for_all_ranks(device)
    dist.destroy_process_group()
