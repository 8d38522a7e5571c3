"""Bytes that Muon sends for one layer of a GPT, and that torch.optim.Muon sends for the same DTensors.

    python benchmarks/muon_bytes.py > benchmarks/results/muon_bytes.jsonl

Bytes that leave a node, and that stay within it, per parameter of the matrices and step, on real gloo ranks.
Collectives of torch.optim.Muon are counted as rings over the ranks in order, as everything plain is here.
"""

import json
import math
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from common import RESULTS, markdown_table, origin, read_rows
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_zpp.zeropp import Muon, Traffic, ZeroPPConfig, apply_zeropp
from megatron_zpp.zeropp.fsdp.collectives import count_all_reduce, count_flat_ring
from megatron_zpp.zeropp.fsdp.topology import RankLayout

HIDDEN = 256
SHAPES = [(3 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (4 * HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN)]
WAYS: dict[str, dict[str, Any]] = {
    "Muon, whole matrices": dict(period=1),
    "Muon, node blocks": dict(period=None),
    "Muon, whole matrices in 4 bits": dict(period=1, momentum_bits=4),
}


class FunctionalCollectives(TorchDispatchMode):
    """Counts the functional collectives, which DTensors are redistributed by."""

    def __init__(self, layout: RankLayout) -> None:
        super().__init__()
        self.layout, self.traffic = layout, Traffic()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, as what is done to local tensors
        name = str(func).removeprefix("_c10d_functional.").removesuffix(".default")
        if "c10d_functional" in str(func):
            if name == "all_gather_into_tensor":
                count_flat_ring(self.traffic, self.layout, args[0].nbytes)
            elif name in ("all_reduce", "all_reduce_"):
                count_all_reduce(self.traffic, self.layout, args[0].nbytes)
            elif name == "reduce_scatter_tensor":
                count_flat_ring(self.traffic, self.layout, args[0].nbytes // self.layout.world_size)
            elif name not in ("wait_tensor", "_wrap_tensor_autograd"):
                raise NotImplementedError(f"{func} is not counted")
        return func(*args, **(kwargs or {}))


def rank_main(rank: int, nodes: int, per_node: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=nodes * per_node)
    torch.manual_seed(0)
    model = nn.ParameterList([torch.randn(shape) for shape in SHAPES])
    fully_shard(model)
    zeropp = apply_zeropp(model, ZeroPPConfig(ranks_per_node=per_node))
    for parameter in model:
        parameter.grad = torch.randn_like(parameter)
    sent: dict[str, Traffic] = {}
    with FunctionalCollectives(RankLayout(nodes, per_node, rank)) as mode:
        torch.optim.Muon(model.parameters()).step()
    sent["torch.optim.Muon"] = mode.traffic
    for name, arguments in WAYS.items():
        Muon(model.parameters(), zeropp, **arguments).step()
        sent[name] = zeropp.traffic.take()
    numbers = torch.tensor([[traffic.inter_node, traffic.intra_node] for traffic in sent.values()])
    dist.all_reduce(numbers)
    if rank == 0:
        parameters = nodes * sum(math.prod(shape) for shape in SHAPES)
        for name, (between, within) in zip(sent, numbers.tolist(), strict=True):
            row = {"nodes": nodes, "ranks_per_node": per_node, "way": name}
            row |= {"between_nodes": round(between / parameters, 3), "within_nodes": round(within / parameters, 3)}
            print(json.dumps(row | origin()), flush=True)
    dist.destroy_process_group()


def table() -> str:
    lines = [
        [f"{r['nodes']} × {r['ranks_per_node']}", r["way"], f"{r['between_nodes']:.2f}", f"{r['within_nodes']:.2f}"]
        for r in read_rows(RESULTS / "muon_bytes.jsonl")
    ]
    return markdown_table(["nodes × ranks", "", "leaves a node", "stays within it"], lines)


def main() -> None:
    for nodes, per_node in ((2, 2), (2, 4), (4, 2)):
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(rank_main, (nodes, per_node, folder), nprocs=nodes * per_node)


if __name__ == "__main__":
    main()
