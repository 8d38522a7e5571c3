"""Requests to torchrun's store, and seconds, until all ranks of a start have found each other; a thread for each rank.

python benchmarks/start.py  # 10, 100 and 1,000 ranks, on one real TCPStore; three starts each, the last one counts
"""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from common import RESULTS, append_row, markdown_table, new_parser

from megatron_zpp.parallel.distributed import _begin_start, _find_start

PATIENCE = timedelta(minutes=5)


class Client:
    def __init__(self, port: int) -> None:
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=PATIENCE)
        self.asked: Counter[str] = Counter()

    def __getattr__(self, name: str) -> object:
        self.asked[name] += 1
        return getattr(self.store, name)


def start(port: int, world_size: int) -> dict[str, float]:
    clients = [Client(port) for _ in range(world_size)]
    begun = time.perf_counter()
    with ThreadPoolExecutor(world_size) as pool:
        stores: list[Any] = [*clients]
        found = [pool.submit(_find_start, stores[rank], rank) for rank in range(1, world_size)]
        number = _begin_start(stores[0], world_size)
        assert all(rank.result() == number for rank in found)
    asked = [client.asked.total() for client in clients]
    return {"seconds": time.perf_counter() - begun, "requests": sum(asked), "of rank 0": asked[0], "most": max(asked)}


def main() -> None:
    new_parser(__doc__).parse_args()
    lines = []
    for world_size in (10, 100, 1000):
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        found = [start(server.port, world_size) for _ in range(3)][-1]
        append_row(RESULTS / "start.jsonl", {"ranks": world_size, **found})
        lines.append([world_size, found["requests"], found["of rank 0"], found["most"], f"{found['seconds']:.2f}"])
    print(markdown_table(["ranks", "requests", "of rank 0", "most of a rank", "seconds"], lines))


if __name__ == "__main__":
    main()
