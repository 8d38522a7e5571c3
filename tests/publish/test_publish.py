"""A second process has the weights of a run, to the bit, at every version that it sees."""

import functools
import gc
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from megatron_zpp.publish import Publisher, PublishError, WeightReader
from megatron_zpp.publish.files import versions_in
from megatron_zpp.zeropp.wire import moves
from tests.conftest import fill
from tests.crashes import run_killed
from tests.ranks import FORKSERVER, run_ranks
from tests.zeropp.training_on_ranks import ALL_FLAGS, Net, TiedNet, shard, step

STEPS, ANCHORS = 12, 5


def digest(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Hash names, shapes, types and bits."""
    sums = hashlib.sha256()
    for name, tensor in sorted(weights, key=lambda item: item[0]):
        sums.update(f"{name} {tensor.dtype} {[*tensor.shape]}".encode())
        sums.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return sums.hexdigest()


def gathered(model: nn.Module) -> dict[str, Tensor]:
    """What the model computes with. Collective."""
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).to(torch.bfloat16) for n, t in tensors.items()}


def train_and_publish(folder: str, rate: float) -> dict[int, str]:
    """The digests of what this run published, by version. For ``run_ranks``."""
    model = Net(width=256, hidden=512, outputs=256)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, ALL_FLAGS, [*model.blocks], mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    publisher = Publisher(model, folder, anchor_interval=ANCHORS)
    published = {publisher.publish(0): digest(gathered(model).items())}
    for i in range(STEPS):
        step(model, optimizer, torch.randn(4, 256, generator=torch.Generator().manual_seed(i)))
        published[publisher.publish(i + 1)] = digest(gathered(model).items())
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


@pytest.mark.parametrize("rate", [1e-6, 1e-3])
def test_another_process_has_the_weights_of_four_ranks_to_the_bit(tmp_path, rate):
    receiver, sender = FORKSERVER.Pipe(duplex=False)
    process = FORKSERVER.Process(target=follow, args=(str(tmp_path), STEPS + 1, sender), daemon=True)
    process.start()
    sender.close()
    published, *others = run_ranks(4, train_and_publish, str(tmp_path), rate)
    assert receiver.poll(60)
    seen = receiver.recv()
    process.join()
    assert all(other == published for other in others)
    assert len(seen) > 3 and seen == {version: published[version] for version in seen}
    assert versions_in(tmp_path)  # those before the anchor before the last are gone
    num_parameters = sum(parameter.numel() for parameter in Net(256, 512, 256).parameters())
    sizes = [
        sum(path.stat().st_size for path in tmp_path.glob(f"v{version:08d}.*")) / num_parameters
        for version in versions_in(tmp_path)
        if version % ANCHORS != 1  # no anchor
    ]
    print(f"{sum(sizes) / len(sizes):.4f} bytes per parameter and step at a learning rate of {rate:g}")
    if rate == 1e-6:
        assert max(sizes) <= 0.05


class Small(nn.Module):
    """A tied weight, a buffer, and less elements than a buffer of bytes is aligned to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(30, 7), nn.Linear(7, 30)
        self.head.weight = self.embedding.weight
        self.register_buffer("bias", torch.randn(3))


@torch.no_grad()
def change(model: nn.Module) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.add_(0.01 * torch.randn(tensor.shape))


def weights(model: nn.Module) -> str:
    return digest((gathered(model) | {name: buffer for name, buffer in model.named_buffers()}).items())


@pytest.fixture
def published(tmp_path):
    """A model, its publisher, and a reader that has version 2."""
    model = Small()
    publisher, reader = Publisher(model, tmp_path, anchor_interval=4), WeightReader(tmp_path)
    assert not reader.update()
    for i in range(2):
        change(model)
        publisher.publish(i)
    assert reader.update() and reader.version == 2 and reader.step == 1
    return model, publisher, reader


@pytest.mark.parametrize("has_kernels", [True, False])
def test_a_reader_that_missed_versions_takes_the_anchor(published, has_kernels, monkeypatch):
    if not has_kernels:
        monkeypatch.setattr(moves, "_has_kernels", lambda format, tensor: False)
    model, publisher, reader = published
    for i in range(2, 14):
        change(model)
        publisher.publish(i)
        if i in (3, 5, 13):  # with versions in between, with an anchor, and when what it has was deleted
            assert reader.update() and reader.step == i
            assert digest(reader.tensors()) == weights(model)
            assert not reader.update()
    assert versions_in(reader.folder)[0] > 6
    other = Small()
    reader.load_into(other)
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(other.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("bad", [torch.nan, -torch.inf, 3.4e38])
def test_readers_never_get_weights_that_are_no_numbers(published, bad):
    """Inf where bf16 makes it of a number, too. A buffer may hold Inf, as masks do, and -0.0 arrives."""
    model, publisher, reader = published
    before, files = weights(model), sorted(reader.folder.iterdir())
    with torch.no_grad():
        model.head.bias[0] = bad
    with pytest.raises(
        PublishError, match=r"head\.bias has NaN or Inf in torch\.bfloat16 after step 3: go on from an older"
    ):
        publisher.publish(3)
    assert not reader.update() and digest(reader.tensors()) == before and sorted(reader.folder.iterdir()) == files
    with torch.no_grad():
        model.head.bias[0], model.bias[0] = -0.0, -torch.inf
    publisher.publish(4)
    assert reader.update() and digest(reader.tensors()) == weights(model)


def test_a_full_disk_is_left_as_it_was_and_publishing_goes_on_when_there_is_room(small_disk):
    torch.manual_seed(0)
    model = nn.Linear(100, 200, bias=False)  # 40 kB in bf16
    publisher, reader = Publisher(model, small_disk), WeightReader(small_disk)
    publisher.publish(0)
    assert reader.update()
    filler = fill(small_disk)
    before, room = sorted(small_disk.iterdir()), 16384
    os.truncate(filler, filler.stat().st_size - room)
    change(model)
    for number in (1, 2):  # moves, then an anchor
        with pytest.raises(
            PublishError, match=rf"cannot publish weights as {small_disk}/v000\S+: No space left on device"
        ):
            publisher.publish(number)
        assert sorted(small_disk.iterdir()) == before and shutil.disk_usage(small_disk).free == room
    assert not reader.update()
    filler.unlink()
    publisher.publish(3)
    assert reader.update() and digest(reader.tensors()) == digest(gathered(model).items())


def test_what_a_killed_run_left_half_written_makes_room_for_the_next(published):
    _, publisher, reader = published
    half = reader.folder / "v00000003.rank00007.safetensors"
    half.write_bytes(bytes(1000))
    publisher._lock.close()
    Publisher(Small(), reader.folder, resume=True)
    assert not half.exists() and versions_in(reader.folder) == [1, 2]


def test_only_what_is_trained_is_published(tmp_path):
    """With LoRA the adapters alone."""
    model, reader = TiedNet(), WeightReader(tmp_path)
    publisher = Publisher(model, tmp_path)
    for i in range(2):
        change(model)
        publisher.publish(i)
        assert reader.update() and digest(reader.tensors()) == digest(gathered(model).items())
    assert {name for name, _ in reader.tensors()} < {name for name, _ in model.named_parameters()}


def test_killed_at_every_change_of_files(tmp_path):
    """A reader sees the version before or the new one, and the next run goes on."""
    model = Small()
    for fatal in range(1, 20):
        folder = tmp_path / str(fatal)
        publisher = Publisher(model, folder, anchor_interval=1)
        for i in range(3):
            publisher.publish(i)
        before, old = WeightReader(folder), weights(model)
        change(model)
        status = run_killed(functools.partial(publisher.publish, 3), fatal)
        publisher._lock.close()
        assert before.update() and before.version in ((4,) if status is None else (3, 4))
        assert digest(before.tensors()) == (weights(model) if before.version == 4 else old)
        change(model)
        Publisher(model, folder, resume=True).publish(4)
        assert before.update() and digest(before.tensors()) == weights(model)
        if status is None:
            break
        assert status == -signal.SIGKILL
    assert fatal >= 4


def test_weights_of_another_model_are_not_loaded(published):
    *_, reader = published
    with pytest.raises(PublishError, match=r"another model: bias, \[3\] there, is missing here"):
        reader.load_into(TiedNet())


def _publish(folder: Path, resume: bool) -> int:
    return Publisher(Small(), folder, resume=resume).publish(7)


def test_two_runs_do_not_publish_into_one_folder(published):
    _, publisher, reader = published
    folder = reader.folder
    with multiprocessing.get_context("fork").Pool(1) as pool:  # locks belong to processes
        for resume in (False, True):
            with pytest.raises(PublishError, match=f"another run publishes into {folder}: give"):
                pool.apply(_publish, (folder, resume))
        publisher._lock.close()
        with pytest.raises(PublishError, match=f"{folder} holds weights of another run, up to version 2"):
            pool.apply(_publish, (folder, False))
        assert pool.apply(_publish, (folder, True)) == 3
    assert reader.update() and reader.step == 7 and digest(reader.tensors()) == weights(Small())


def fail_on_one_rank(folder: str) -> tuple[list[str], int]:
    """What each rank is told, and the version that is published then. For ``run_ranks``."""
    model = Net(width=8, hidden=12, outputs=8, num_blocks=1)
    shard(model, None)
    publisher, told = Publisher(model, folder), []
    rank = torch.distributed.get_rank()
    publisher.publish(0)
    if rank == 1:
        publisher.folder = Path(folder) / "nowhere"
    for _ in range(2):
        try:
            publisher.publish(1)
        except PublishError as error:
            told.append(str(error))
    publisher.folder = Path(folder)
    return told, publisher.publish(2)


def test_a_second_publisher_of_a_process_keeps_the_lock(tmp_path):
    first = Publisher(Small(), tmp_path)
    first.publish(0)
    again = Publisher(Small(), tmp_path, resume=True)
    del first
    gc.collect()  # closing one file of a lock would give up the lock of all of this process
    with multiprocessing.get_context("fork").Pool(1) as pool, pytest.raises(PublishError, match="another run"):
        pool.apply(_publish, (tmp_path, True))
    assert again.publish(1) == 2


def test_other_parameters_of_the_same_size_are_refused(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].requires_grad_(False)
    publisher = Publisher(model, tmp_path)
    publisher.publish(0)
    model[0].requires_grad_(False)
    model[1].requires_grad_(True)
    with pytest.raises(PublishError, match="make another Publisher"):
        publisher.publish(1)


def test_what_cannot_be_deleted_changes_nothing_for_readers(published):
    model, publisher, reader = published
    with mock.patch.object(Path, "unlink", side_effect=PermissionError):
        for step in range(2, 11):
            change(model)
            publisher.publish(step)
            assert reader.update() and digest(reader.tensors()) == weights(model)
    assert (reader.folder / "v00000001.json").exists()
    for step in range(11, 14):
        publisher.publish(step)
    assert min(versions_in(reader.folder)) == 9


def test_a_type_that_has_no_name_is_refused_by_name(tmp_path):
    model = Small()
    model.register_buffer("frequencies", torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(PublishError, match=r"frequencies is of torch\.complex64"):
        Publisher(model, tmp_path).publish(0)


def test_what_one_rank_cannot_write_is_an_error_on_all(tmp_path):
    for told, version in run_ranks(2, fail_on_one_rank, str(tmp_path)):
        assert version == 4
        for number, text in zip((2, 3), told, strict=True):
            file = tmp_path / "nowhere" / f"v{number:08d}.rank00001.safetensors"
            assert text == f"rank 1: cannot publish weights as {file}: No such file or directory (check the path)"
    manifest = json.loads((tmp_path / "v00000004.json").read_text())
    assert manifest["base"] is None and WeightReader(tmp_path).update()
