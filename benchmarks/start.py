"""Requests to torchrun's store, and seconds, until all ranks of a start share a fresh part of it; a process for each rank.

python benchmarks/start.py  # 64 and 512 ranks on one real TCPStore: three starts each, in turns, the last one counts

numbered: ranks agree on the number of the start. prefix: it is TORCHELASTIC_RESTART_COUNT. Then each rank sets a key in
the fresh part, and all wait for the last. Ranks are forked from one warm process, and time begins when all have connected.
"""

import os
import time
from collections import Counter
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

import torch.distributed as dist
from common import RESULTS, append_row, markdown_table, new_parser

from megatron_zpp.parallel.distributed import _begin_start, _find_start

PATIENCE = timedelta(minutes=5)
STARTS = 3


class Client:
    def __init__(self, port: int) -> None:
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=PATIENCE)
        self.asked: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.asked[name] += 1
        return getattr(self.store, name)


def serve(ports: Any, end: Any) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ports.put(server.port)
    end.wait()


def rank_of_start(port: int, way: str, number: int, rank: int, world_size: int, gate: Any, results: Any) -> None:
    client: Any = Client(port)
    gate.wait()
    if way == "numbered":
        found = _begin_start(client, world_size) if rank == 0 else _find_start(client, rank)
        assert found == number
    asked = client.asked.total()
    store = dist.PrefixStore(f"{way} {number}", client.store)
    if store.add("ranks", 1) == world_size:
        store.set("all", "")
    store.wait(["all"])
    results.put((rank, asked, time.time()))
    os._exit(results.close() or results.join_thread() or 0)


def start(port: int, way: str, number: int, world_size: int) -> dict[str, float]:
    context = get_context("fork")
    gate, results = context.Barrier(world_size + 1), context.Queue()
    ranks = [
        context.Process(target=rank_of_start, args=(port, way, number, rank, world_size, gate, results))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    gate.wait()
    begun = time.time()
    found = [results.get() for _ in ranks]
    for process in ranks:
        process.join()
    asked = {rank: requests for rank, requests, _ in found}
    seconds = max(end for *_, end in found) - begun
    return {"seconds": seconds, "requests": sum(asked.values()), "of rank 0": asked[0], "most": max(asked.values())}


def main() -> None:
    new_parser(__doc__).parse_args()
    context, lines = get_context("fork"), []
    for world_size in (64, 512):
        ports, end = context.Queue(), context.Event()
        server = context.Process(target=serve, args=(ports, end))
        server.start()
        port = ports.get()
        for number in range(1, STARTS + 1):
            found = {way: start(port, way, number, world_size) for way in ("numbered", "prefix")}
            print(world_size, number, found, flush=True)
        end.set()
        for way, figures in found.items():
            append_row(RESULTS / "start.jsonl", {"ranks": world_size, "way": way, "processes": True, **figures})
            shown = figures["requests"], figures["of rank 0"], figures["most"], f"{figures['seconds']:.2f}"
            lines.append([world_size, way, *shown])
    print(markdown_table(["ranks", "way", "requests", "of rank 0", "most of a rank", "seconds"], lines))


if __name__ == "__main__":
    main()
