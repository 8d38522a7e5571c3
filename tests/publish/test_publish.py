"""A second process has the weights of a run, to the bit, at every version that it sees."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import shutil
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from megatron_zpp.publish import Publisher, PublishError, WeightReader
from tests.crashes import run_killed
from tests.ranks import FORKSERVER, run_ranks
from tests.zeropp.training_on_ranks import ALL_FLAGS, Net, TiedNet, shard, step

STEPS = 50


def digest(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Of names, shapes, types and bits."""
    sums = hashlib.sha256()
    for name, tensor in sorted(weights, key=lambda item: item[0]):
        sums.update(f"{name} {tensor.dtype} {[*tensor.shape]}".encode())
        sums.update(tensor.contiguous().view(torch.uint8).numpy())
    return sums.hexdigest()


def whole(model: nn.Module) -> dict[str, Tensor]:
    """What the model computes with, gathered. Collective."""
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).to(torch.bfloat16) for n, t in tensors.items()}


def train_and_publish(folder: str, rate: float) -> dict[int, str]:
    """The digests of what this run published, by version. For ``run_ranks``."""
    model = Net(width=256, hidden=512, outputs=256)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, ALL_FLAGS, [*model.blocks], mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    publisher = Publisher(model, folder, anchor_interval=20)
    published = {publisher.publish(0): digest(whole(model).items())}
    for i in range(STEPS):
        step(model, optimizer, torch.randn(4, 256, generator=torch.Generator().manual_seed(i)))
        published[publisher.publish(i + 1)] = digest(whole(model).items())
    return published


def follow(folder: str, last: int, sender) -> None:
    """Send the digest of every version seen, by version. In a process of its own."""
    reader, seen = WeightReader(folder), {}
    while reader.version != last:
        if reader.update():
            seen[reader.version] = digest(reader.tensors())
        else:
            time.sleep(0.01)
    sender.send(seen)


def bytes_per_parameter(folder: Path, num_parameters: int) -> list[float]:
    """What each version but the anchors takes, manifest included, per parameter."""
    versions = {}
    for path in folder.glob("v*"):
        versions.setdefault(path.name[:9], []).append(path)
    steps = [paths for name, paths in versions.items() if json.loads((folder / f"{name}.json").read_text())["base"]]
    return [sum(path.stat().st_size for path in paths) / num_parameters for paths in steps]


@pytest.mark.parametrize("rate", [1e-6, 1e-3])
def test_another_process_has_the_weights_to_the_bit(tmp_path, rate):
    receiver, sender = FORKSERVER.Pipe(duplex=False)
    process = FORKSERVER.Process(target=follow, args=(str(tmp_path), STEPS + 1, sender), daemon=True)
    process.start()
    sender.close()
    published, *others = run_ranks(4, train_and_publish, str(tmp_path), rate)
    assert receiver.poll(60)
    seen = receiver.recv()
    process.join()
    assert all(other == published for other in others)
    assert len(seen) > 5 and seen == {version: published[version] for version in seen}
    sizes = bytes_per_parameter(tmp_path, sum(p.numel() for p in Net(256, 512, 256).parameters()))
    print(f"{sum(sizes) / len(sizes):.4f} bytes per parameter and step at a learning rate of {rate:g}")
    if rate == 1e-6:
        assert max(sizes) <= 0.05
