"""Runs that save to an S3 server and load from it, with kills in the middle of an upload and requests that fail."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron_zpp.checkpoint import find_checkpoint, iterate_tensors, problems, read_meta
from megatron_zpp.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter, upload
from tests.conftest import ROOT, environment
from tests.tools import run
from tests.training.small_run import NO_DROPOUT, flags, ranks_of

pytestmark = pytest.mark.integrations
ON_TWO = "--local-ranks 2 --zero-stage 3"
EXPIRED = "refuse 400 ExpiredToken"


class Server:
    """A server on this machine, whose bucket is ``url``."""

    url = "s3://bucket/runs"

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.orders, self.log = folder / "orders", folder / "log"
        self.order("")
        endpoint = f"http://127.0.0.1:{port}"
        self.env = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "secret"}
        self.env |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1"}
        command = [sys.executable, ROOT / "tests" / "s3_server.py", str(port), self.orders]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)

    def order(self, text: str) -> None:
        """Have every request from now on served ("") or not."""
        Path(f"{self.orders}.new").write_text(text)
        os.replace(f"{self.orders}.new", self.orders)

    def release(self) -> None:
        """Answer what was held, as ordered now."""
        Path(f"{self.orders}.release").touch()

    def wait_until_held(self) -> None:
        held, deadline = Path(f"{self.orders}.held"), time.monotonic() + 60
        while not held.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        held.unlink()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("s3"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.env.items():
            patch.setenv(name, value)
        import s3fs

        s3fs.S3FileSystem().mkdir("bucket")
        yield server
    server.process.kill()
    server.process.wait()


def command(data: str, save: str, tmp_path: Path, *more: str) -> list[str]:
    kept = f"--save {save} --load {save} --save-interval 2 --metrics-dir {tmp_path / 'logs'}"
    train = flags(data, NO_DROPOUT, kept, *more, length="--train-iters 6")
    return ["python", str(ROOT / "pretrain_gpt.py"), *train]


def kill_held(server: Server, held: str, words: list[str]) -> None:
    """Start a run, and kill all of its processes while the server holds the object ``held``."""
    server.order(f"hold {held}")
    with subprocess.Popen(words, env=environment(JOB_OF_TEST=held), stdout=subprocess.DEVNULL) as job:
        server.wait_until_held()
        for process in (job.pid, *ranks_of(job)):
            os.kill(process, signal.SIGKILL)
    server.order("")


def tensors_of(folder: str) -> dict[str, torch.Tensor]:
    found = find_checkpoint(folder)
    assert found is not None and problems(found) == []
    return dict(iterate_tensors(found, read_meta(found)))


def test_a_run_killed_in_an_upload_goes_on_to_the_bit(server, data, tmp_path):
    whole, save = str(tmp_path / "whole"), f"{server.url}/killed"
    run(*command(data, whole, tmp_path / "a", ON_TWO))
    kill_held(server, "iter_0000004/rank_00001", command(data, save, tmp_path / "b", ON_TWO))
    done = run(*command(data, save, tmp_path / "b", ON_TWO))
    assert f"note: passed over {save}/iter_0000004: its upload was cut short" in done.stdout
    assert f"successfully loaded checkpoint {save}/iter_0000002 at iteration 2" in done.stdout
    assert f"saving checkpoint of iteration 4 to {save} while training goes on" in done.stdout
    ours, theirs = tensors_of(save), tensors_of(whole)
    assert ours.keys() == theirs.keys() and len(ours) > 20
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_requests_that_fail_cost_a_checkpoint_and_one_line(server, data, tmp_path):
    save = f"{server.url}/refused"
    run(*command(data, save, tmp_path, "--exit-interval 2"))
    server.order(EXPIRED)
    done = run(*command(data, save, tmp_path), status=2)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: --save {save} cannot be written: cannot write {save}/lock: The server says Exp")
    assert line.endswith("(check its name, the network and your credentials, which the next try reads again)")
    server.order("hold iter_0000004/rank_00000")
    words = command(data, save, tmp_path)
    with subprocess.Popen(words, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as going:
        server.wait_until_held()
        server.order(EXPIRED)
        server.release()
        _, err = going.communicate(timeout=100)
    assert going.returncode == 2 and err.count("NOT SAVED: rank 0: cannot ") == 2 and "Training goes on" in err, err
    assert err.splitlines()[-1].startswith("error: the checkpoint of the last iteration, 6, was not saved"), err
    server.order("")
    assert problems(find_checkpoint(save)) == [] and find_checkpoint(save).name == "iter_0000002"


def test_a_forked_loader_process_reads_a_dataset(server, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    prefix, url = str(tmp_path / "text"), "s3://bucket/text"
    with IndexedDatasetWriter(prefix, "<u2") as writer:
        for i in range(20):
            writer.add_document([[i, i + 1, i + 2]])
    upload(prefix, url)
    dataset = IndexedDataset(url)
    assert dataset[3].tolist() == [3, 4, 5] and dataset.token_range() == (0, 21)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(dataset.get, range(20), chunksize=20)[7].tolist() == [7, 8, 9]
