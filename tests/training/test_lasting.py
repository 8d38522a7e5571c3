"""A run outlives its logs, and ends when it is over: full disks, closed pipes, children that do not end, wandb."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_zpp.metrics import lasting
from megatron_zpp.metrics.lasting import Attempts
from tests.conftest import ROOT, fill
from tests.ranks import run_ranks
from tests.tools import run as run_program
from tests.training.small_run import call_pretrain, flags

TINY = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 2 --train-iters 6 --lr 1e-3 --mock-data --vocab-size 100 --log-interval 1 --eval-iters 1 "
    "--num-workers 0"
)
SAVED = "latest_checkpointed_iteration.txt"


def run(save: Path, *more: str, shell: str = "", status: int = 0) -> subprocess.CompletedProcess[str]:
    """The trainer, as a shell starts it; ``shell`` stands behind the command."""
    python = sys.executable if ">&-" in shell else "python"  # what tests keep warm needs its streams
    words = f"{python} {ROOT / 'pretrain_gpt.py'} {TINY} --save {save} --save-interval 6 {' '.join(more)} {shell}"
    return run_program("bash", "-c", f"set -o pipefail; {words}", status=status, PYTHONPATH=str(ROOT))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("shell", ["> /dev/full", "| head -n 1", ">&-"], ids=["full disk", "closed pipe", "closed"])
def test_a_log_that_cannot_be_written_ends_no_run(tmp_path, shell):
    done = run(tmp_path, shell=shell)
    assert (tmp_path / SAVED).read_text().strip() == "6"
    assert done.stderr.count("cannot be written") == ("-" not in shell or "head" in shell)
    assert "full" not in shell or "warning: stdout (/dev/full) cannot be written" in done.stderr


@pytest.mark.parametrize("free", ["16k", "0"])
def test_a_full_disk_under_tensorboard_and_profile_ends_no_run(tmp_path, free):
    pytest.importorskip("tensorboard")
    small = tmp_path / "small"
    small.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", small]).returncode:
        pytest.skip("needs root, to mount a small disk")
    try:
        if free == "0":  # when the run begins
            fill(small)
        profile = "--profile --use-pytorch-profiler --profile-step-start 2 --profile-step-end 4"
        done = run(tmp_path / "save", f"--tensorboard-dir {small} {profile}")
    finally:
        subprocess.run(["umount", small], check=True)
    assert (tmp_path / "save" / SAVED).read_text().strip() == "6"
    warnings = re.findall(r"^warning: (.*) cannot be written", done.stderr, re.MULTILINE)
    metrics = {f"metrics.jsonl in {small}"}  # which may find room in 16 kB
    assert {*warnings} - metrics == {
        f"TensorBoard's events in {small}",
        f"the profile in {small}/rank00000.trace.json.gz",
    }
    assert len(warnings) == len({*warnings}) and (free != "0" or metrics <= {*warnings})


def test_a_failed_attempt_is_one_warning_and_is_tried_again_later(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(lasting.time, "monotonic", lambda: now[0])
    attempts, done = Attempts("the place"), []

    def fails():
        raise OSError("no space")

    for seconds, work, was_done in (
        (1, fails, 0),
        (30, done.clear, 0),
        (62, fails, 0),
        (130, lambda: done.append(1), 1),
    ):
        now[0] = seconds
        assert attempts(work) == was_done
    assert done == [1] and capsys.readouterr().err.count("warning: the place cannot be written (no space)") == 1


def test_the_checkpoints_of_another_run_are_kept(tmp_path):
    """Unless the run goes on from there, or says that they may go."""
    run(tmp_path)
    before = (tmp_path / "iter_0000006" / "meta.json").read_text()
    assert run(tmp_path, status=2).stderr.startswith(
        f"error: {tmp_path} holds checkpoints of another run, up to iter_0000006: go on from there with --load "
    )
    assert (tmp_path / "iter_0000006" / "meta.json").read_text() == before
    run(tmp_path, f"--load {tmp_path}/")
    run(tmp_path, "--overwrite-save")
    assert (tmp_path / "iter_0000006" / "meta.json").read_text() != before


def test_an_evaluation_of_nothing_is_not_logged_after_a_resume(tmp_path):
    assert "validation loss" in run(tmp_path, "--lr-decay-iters 8 --eval-interval 3").stdout
    done = run(tmp_path, f"--lr-decay-iters 8 --train-iters 8 --load {tmp_path} --eval-iters 0 --eval-interval 1")
    assert "validation loss" not in done.stdout


@pytest.mark.long
def test_a_run_that_cannot_start_its_data_workers_ends():
    """It printed its error, and waited for the workers that it had started."""
    words = f"ulimit -n 64; exec {sys.executable} {ROOT / 'pretrain_gpt.py'} {TINY} --num-workers 16"
    assert "Too many open files" in run_program("bash", "-c", words, status=2, timeout=60).stderr


def descendants(process: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return children + [found for child in children for found in descendants(child)]


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")
@pytest.mark.parametrize(
    "method",
    ["fork", pytest.param("forkserver", marks=pytest.mark.long)],  # Python 3.14 starts processes by the second
)
def test_data_workers_die_with_a_killed_rank(method):
    """A rank cannot clean up: it learns nothing of SIGKILL."""
    program = f"import multiprocessing; multiprocessing.set_start_method({method!r})\n"
    program += "from megatron_zpp.commands.pretrain import main; from megatron_zpp.families import GPT; main(GPT)"
    words = [sys.executable, "-c", program, *TINY.split(), "--num-workers", "2"]
    words[words.index("--train-iters") + 1] = "1000000"
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if " iteration " in line:
                break
        workers = descendants(process.pid)
        assert len(workers) >= 2
        process.send_signal(signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 4  # torch looks for a parent every 5 s
        while any(Path(f"/proc/{worker}").exists() for worker in workers):
            assert time.monotonic() < deadline, "data workers outlive their rank"
            time.sleep(0.05)
    finally:
        process.kill()


def offline(*argvs: list[str]):
    os.environ["WANDB_MODE"] = "offline"
    return call_pretrain(*argvs)


def test_a_folder_that_cannot_be_written_ends_no_run(data, tmp_path):
    pytest.importorskip("wandb.sdk", reason="wandb is not installed")
    (tmp_path / "wandb").write_text("a file is in the folder's place")
    argv = flags(data, f"--wandb-project p --save {tmp_path} --save-interval 9")
    ((code, _, err),) = run_ranks(1, offline, argv)[0]
    assert code == 0 and err.count("warning: wandb's run of p cannot be written") == 1, err
