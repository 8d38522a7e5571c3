"""A fault campaign: runs are killed, stopped and robbed of their files, and must end as if nothing had happened.

    sudo .venv/bin/python benchmarks/faults.py --seed 1 --output benchmarks/results/faults.jsonl

One small GPT is trained on 2 ranks, with dropout, LoCo and a save at every step or two, once undisturbed and then many
times with faults that are drawn from the seed. After each fault the same command is started again, and in the end all
parameters and the optimizer must be those of the undisturbed run, bit for bit. Each case is one line of the output:

    survived   went on by itself, or with the same command, and ended bit-identical
    reported   stopped with an error that names the cause, and changed nothing (damage, a folder in use, no room)
    lost, hung, wrong   what must not happen

Ranks are forked from one process that has imported torch, which takes the place of torchrun: it ends the others a while
after one has died. The killed link runs real torchrun in the cluster in a box. Disk full, read-only folder and killed
link need root, and are left out with a note elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from cluster_in_a_box import check_requirements, cluster, programs  # noqa: E402

from megatron_zpp.checkpoint import candidates, iterate_tensors, problems, read_meta  # noqa: E402

RANKS = 2
ITERATIONS = 12
PATIENCE = 60.0  # seconds after which a run counts as hung
GRACE = 30.0  # seconds in which all ranks must be gone after one has failed, as torchrun does it
SETTINGS = f"""--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1
    --global-batch-size 4 --train-iters {ITERATIONS} --lr 3e-3 --log-interval 1 --eval-iters 0 --num-workers 0
    --mock-data --vocab-size 200 --exit-signal-handler --distributed-timeout-minutes 0.3 --zero-ranks-per-node 1
    --zero-quantized-gradients --zeropp-loco --save-keep-last 3"""
_context = multiprocessing.get_context("forkserver")


@dataclass
class Case:
    kind: str
    number: int
    outcome: str
    detail: str
    seconds: float


@dataclass
class Result:
    """How one start of the program ended."""

    codes: list[int | None]  # of each rank; None: it had to be killed
    output: str
    seconds: float

    @property
    def hung(self) -> bool:
        return None in self.codes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--terms", type=int, default=20)
    parser.add_argument("--damages", type=int, default=24)
    parser.add_argument("--output", type=Path, help="append one JSON line for each case, and a summary")
    arguments = parser.parse_args()
    _context.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp", "megatron_zpp.training.pretrain"])
    with tempfile.TemporaryDirectory(prefix="faults") as folder:
        campaign = Campaign(Path(folder), random.Random(arguments.seed), arguments.seed, arguments.output)
        campaign.reference()
        campaign.repeat("kill", arguments.kills, campaign.kills)
        campaign.repeat("term", arguments.terms, campaign.terms)
        campaign.each("damage", arguments.damages, campaign.damage)
        campaign.each("two jobs", 2, campaign.two_jobs)
        if os.geteuid() == 0:
            campaign.each("disk full", 2, campaign.disk_full)
            campaign.each("read-only", 2, campaign.read_only)
            campaign.each("killed link", 2, campaign.killed_link)
        else:
            print("left out without root: disk full, read-only, killed link")
        campaign.summary()


class Campaign:
    def __init__(self, folder: Path, rng: random.Random, seed: int, output: Path | None) -> None:
        self.folder, self.rng, self.seed, self.output = folder, rng, seed, output
        self.cases: list[Case] = []
        self.begun = time.monotonic()

    def reference(self) -> None:
        """The undisturbed run."""
        for name in ("warm-up", "reference"):  # the first one waits for the import of torch
            result = start(command(self.folder / name)).wait()
            assert result.codes == [0] * RANKS, result.output
        self.run_seconds = result.seconds
        print(f"undisturbed: {result.seconds:.1f} s")

    def check(self, folder: Path) -> tuple[str, str]:
        """Whether a run that ended has the parameters and the optimizer of the undisturbed one."""
        ours, theirs = (path / f"iter_{ITERATIONS:07d}" for path in (folder, self.folder / "reference"))
        if not (ours / "complete").exists():
            return "lost", "the last checkpoint is not there"
        names = 0
        metas = read_meta(ours), read_meta(theirs)
        pairs = (iterate_tensors(path, meta) for path, meta in zip((ours, theirs), metas, strict=True))
        for (name, mine), (other_name, other) in zip(*pairs, strict=True):
            names += 1
            if name != other_name or not torch.equal(mine, other):
                return "wrong", f"{name} differs"
        if metas[0]["counters"] != metas[1]["counters"]:
            return "wrong", f"counters {metas[0]['counters']}"
        return "survived", f"{names} tensors bit-identical"

    def repeat(self, kind: str, number: int, disturb: Callable[[Path, int], Iterator[tuple[str, str]]]) -> None:
        """Runs that are disturbed again and again until so many faults have hit one."""
        done = run = 0
        while done < number:
            run += 1
            folder = self.folder / f"{kind} {run}"
            pending: list[tuple[str, str, float]] = []
            begun = time.monotonic()
            for outcome, detail in disturb(folder, number - done):
                pending.append((outcome, detail, time.monotonic() - begun))
                begun = time.monotonic()
            outcome, detail = self.check(folder)  # a fault was survived if its run ended as the undisturbed one
            for own, what, seconds in pending:
                done += 1
                self.record(kind, done, own if own != "survived" else outcome, f"run {run}: {what}; {detail}", seconds)
            shutil.rmtree(folder, ignore_errors=True)

    def each(self, kind: str, number: int, disturb: Callable[[Path, int], tuple[str, str]]) -> None:
        for case in range(1, number + 1):
            folder, begun = self.folder / f"{kind} {case}", time.monotonic()
            outcome, detail = disturb(folder, case)
            self.record(kind, case, outcome, detail, time.monotonic() - begun)
            shutil.rmtree(folder, ignore_errors=True)

    def record(self, kind: str, number: int, outcome: str, detail: str, seconds: float) -> None:
        case = Case(kind, number, outcome, detail, round(seconds, 2))
        self.cases.append(case)
        print(f"{time.monotonic() - self.begun:7.1f} s  {kind} {number}: {outcome} ({detail})"[:200], flush=True)
        self.write({"seed": self.seed} | asdict(case))

    def write(self, row: dict[str, Any]) -> None:
        if self.output is not None:
            with self.output.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def summary(self) -> None:
        table: dict[str, Counter[str]] = {}
        for case in self.cases:
            table.setdefault(case.kind, Counter())[case.outcome] += 1
        for kind, outcomes in table.items():
            print(f"{kind:12s} {dict(outcomes)}")
        self.write(
            {
                "summary": {kind: dict(outcomes) for kind, outcomes in table.items()},
                "seed": self.seed,
                "seconds": round(time.monotonic() - self.begun, 1),
                "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
            }
        )

    # Faults

    def kills(self, folder: Path, at_most: int) -> Iterator[tuple[str, str]]:
        """SIGKILL to a rank at a time drawn from the whole run, start and saves included, up to 8 times."""
        for _ in range(min(at_most, 8)):
            rank, after = self.rng.randrange(RANKS), self.rng.uniform(0.0, self.run_seconds)
            run = start(command(folder, "--save-interval", str(self.rng.choice((1, 1, 2)))))
            where = run.kill(rank, signal.SIGKILL, after)
            result = run.wait()
            if where is None:
                break  # it was over before
            yield (
                "hung" if result.hung else "survived",
                f"rank {rank} after {after:.2f} s, {where}; all ended {result.seconds:.1f} s after the start",
            )
        yield from self.finish(folder)

    def terms(self, folder: Path, at_most: int) -> Iterator[tuple[str, str]]:
        """SIGTERM or SIGUSR1 to one rank: saved, all end with status 0, and the next start goes on."""
        for _ in range(min(at_most, 4)):
            rank, number = self.rng.randrange(RANKS), self.rng.choice((signal.SIGTERM, signal.SIGUSR1))
            run = start(command(folder, "--save-interval", "1000"))
            if not run.wait_for("consumed samples"):
                result = run.wait()
                if result.codes != [0] * RANKS:
                    yield "hung" if result.hung else "lost", f"no first step: status {result.codes}"
                return  # else the run had come to its end before
            where = run.kill(rank, number, self.rng.uniform(0.0, 0.1))
            result = run.wait()
            if where is None:
                break
            saved = "exiting program at iteration" in result.output or f"{ITERATIONS}/" in result.output
            good = result.codes == [0] * RANKS and saved
            yield (
                "survived" if good else ("hung" if result.hung else "lost"),
                f"{number.name} to rank {rank}, {where}; status {result.codes}",
            )
        yield from self.finish(folder)

    def finish(self, folder: Path) -> Iterator[tuple[str, str]]:
        """The last start, undisturbed. Yields only what is not well."""
        result = start(command(folder)).wait()
        if result.codes != [0] * RANKS:
            yield "hung" if result.hung else "lost", f"could not go on: status {result.codes}: {result.output[-500:]}"

    def damage(self, folder: Path, number: int) -> tuple[str, str]:
        """The newest of two checkpoints is damaged: refused by name; and passed over with --load-latest-good."""
        half = start(command(folder, "--save-interval", "3", "--exit-interval", "6")).wait()
        assert half.codes == [0] * RANKS, half.output
        newest = candidates(str(folder))[0]
        name = self.rng.choice(sorted(path.name for path in newest.iterdir()))
        how = ("truncated", "bit flipped", "file missing", "metadata missing")[number % 4]
        if how == "metadata missing":
            name = self.rng.choice(("meta.json", "index.json", "complete"))
        spoil(newest / name, how, self.rng)
        refused = start(command(folder)).wait()
        if refused.hung or set(refused.codes) != {2} or newest.name not in refused.output:
            return "hung" if refused.hung else "wrong", f"{name} {how}: not refused: {refused.output[-300:]}"
        result = start(command(folder, "--load-latest-good")).wait()
        if result.codes != [0] * RANKS:
            return "lost", f"{name} {how}: {result.output[-300:]}"
        outcome, detail = self.check(folder)
        return outcome, f"{name} {how}: refused by name; with --load-latest-good: {detail}"

    def two_jobs(self, folder: Path, number: int) -> tuple[str, str]:
        """A second job on the folder of a running one is refused; the first goes on."""
        first = start(command(folder, "--save-interval", "1", "--train-iters", str(ITERATIONS)), slow=2.0)
        first.wait_for("consumed samples")
        second = start(command(folder, "--save-interval", "1")).wait()
        result = first.wait()
        outcome, detail = self.check(folder)
        if outcome != "survived" or result.codes != [0] * RANKS:
            return outcome, detail
        if set(second.codes) != {2} or "is in use by another job" not in second.output:
            return "wrong", f"the second job was not refused: {second.codes} {second.output[-300:]}"
        return "reported", f"the second job was refused; the first: {detail}"

    def disk_full(self, folder: Path, number: int) -> tuple[str, str]:
        """A file system with room for some checkpoints: loud, training goes on, what was saved stays good."""
        with tmpfs(folder, "2m"):
            result = start(command(folder, "--save-interval", "1", "--save-keep-last", "100")).wait()
            if result.hung or f"iteration {ITERATIONS:8d}/" not in result.output or set(result.codes) != {2}:
                return (
                    "hung" if result.hung else "lost",
                    f"training did not go on: {result.codes} {result.output[-300:]}",
                )
            if "No space left" not in result.output or "NOT SAVED" not in result.output:
                return "wrong", f"nothing was said: {result.output[-300:]}"
            kept = candidates(str(folder))
            damaged = [path.name for path in kept if problems(path)]
            if damaged or not kept:
                return "lost", f"damaged: {damaged} of {len(kept)}"
            subprocess.run(["mount", "-o", "remount,size=50m", folder], check=True)
            again = start(command(folder)).wait()
            outcome, detail = self.check(folder)
            if again.codes != [0] * RANKS:
                return "lost", again.output[-300:]
            return outcome, f"{len(kept)} good checkpoints stayed; with room again: {detail}"

    def read_only(self, folder: Path, number: int) -> tuple[str, str]:
        """The file system turns read-only while the run saves, and later writable again."""
        with tmpfs(folder, "50m"):
            run = start(command(folder, "--save-interval", "1"), slow=0.3)
            run.wait_for("successfully saved checkpoint")
            # Laid over it: a file system with open files does not let itself be made read-only.
            subprocess.run(["mount", "--bind", folder, folder], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
            result = run.wait()
            said = "Read-only file system" in result.output and "NOT SAVED" in result.output
            if result.hung or f"iteration {ITERATIONS:8d}/" not in result.output or not said:
                return "hung" if result.hung else "lost", f"{result.codes} {result.output[-300:]}"
            subprocess.run(["umount", folder], check=True)
            again = start(command(folder)).wait()
            outcome, detail = self.check(folder)
            return (outcome if again.codes == [0] * RANKS else "lost"), f"writable again: {detail}"

    def killed_link(self, folder: Path, number: int) -> tuple[str, str]:
        """A node's link goes down for good: all ranks end in time, and the next start goes on."""
        check_requirements()
        argv = command(folder, "--save-interval", "2", "--train-iters", str(ITERATIONS))
        with (
            cluster(RANKS, None) as namespaces,
            programs([str(ROOT / "pretrain_gpt.py"), *argv], namespaces, 1) as nodes,
        ):
            tracker = folder / "latest_checkpointed_iteration.txt"
            deadline = time.monotonic() + PATIENCE
            while not tracker.exists() and time.monotonic() < deadline:
                time.sleep(0.005)
            subprocess.run(["ip", "-n", namespaces[1], "link", "set", "eth0", "down"], check=True)
            down = time.monotonic()
            outputs = []
            for node in nodes:
                try:
                    outputs.append(node.communicate(timeout=PATIENCE + 30)[0])
                except subprocess.TimeoutExpired:
                    return "hung", f"a node was still there {time.monotonic() - down:.0f} s after the link went down"
            ended = time.monotonic() - down
        finished = "saved checkpoint from iteration      12" in "".join(outputs)
        named = [line for line in "".join(outputs).splitlines() if line.startswith("error: rank")]
        again = start(command(folder)).wait()
        if again.codes != [0] * RANKS:
            return "lost", again.output[-300:]
        outcome, detail = self.check(folder)
        what = "was over before" if finished else (named or ["nothing was said"])[0][:120]
        return outcome, f"all ended {ended:.0f} s after the link went down ({what}); started again: {detail}"


# Starting the program


def command(folder: Path, *more: str) -> list[str]:
    save = ["--save", str(folder), "--load", str(folder), "--save-interval", "2"]
    return [*SETTINGS.split(), *save, *more]


class Run:
    """Ranks of one start of the program, with their output in one file."""

    def __init__(self, argv: list[str], slow: float) -> None:
        self.file = tempfile.NamedTemporaryFile(prefix="output", suffix=".log")  # noqa: SIM115
        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]
        self.begun = time.monotonic()
        self.processes = [
            _context.Process(target=_rank, args=(rank, port, argv, self.file.name, slow)) for rank in range(RANKS)
        ]
        for process in self.processes:
            process.start()

    def output(self) -> str:
        return Path(self.file.name).read_text(errors="replace")

    def is_over(self) -> bool:
        return all(process.exitcode is not None for process in self.processes)

    def wait_for(self, text: str) -> bool:
        deadline = time.monotonic() + PATIENCE
        while text not in self.output() and time.monotonic() < deadline and not self.is_over():
            time.sleep(0.005)
        return text in self.output()

    def kill(self, rank: int, number: signal.Signals, after: float) -> str | None:
        """Send a signal, and say what the run was doing; None if it had ended."""
        time.sleep(after)
        output = self.output().splitlines()
        process = self.processes[rank]
        if process.exitcode is not None:
            return None
        assert process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
        steps = sum(" iteration " in line and "consumed" in line for line in output)
        is_saving = bool(output) and sum("while training goes on" in x for x in output) > sum(
            "successfully saved" in x for x in output
        )
        return f"{steps} steps done" + (", while saving" if is_saving else "")

    def wait(self) -> Result:
        """Until all ranks have ended. As torchrun does, ask the others to end, by SIGTERM, when one has failed."""
        deadline = time.monotonic() + PATIENCE
        asked = False
        while not self.is_over() and time.monotonic() < deadline:
            if not asked and any(process.exitcode not in (None, 0) for process in self.processes):
                asked, deadline = True, time.monotonic() + GRACE
                for process in self.processes:
                    process.terminate()
            time.sleep(0.005)
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
            process.join()
        return Result(codes, self.output(), time.monotonic() - self.begun)


def start(argv: list[str], slow: float = 0.0) -> Run:
    return Run(argv, slow)


def _rank(rank: int, port: int, argv: list[str], output: str, slow: float) -> None:
    """What torchrun and ``python pretrain_gpt.py`` do, on one rank."""
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    sys.argv = ["pretrain_gpt.py", *argv]
    from megatron_zpp.architectures import GPT
    from megatron_zpp.training import pretrain as program

    if slow:  # seconds more for each step: time enough for something to happen to it
        train_step = program.train_step

        def slow_step(*arguments: Any, **more: Any) -> Any:
            time.sleep(slow)
            return train_step(*arguments, **more)

        program.train_step = slow_step
    program.pretrain(GPT)


def spoil(path: Path, how: str, rng: random.Random) -> None:
    if "missing" in how:
        path.unlink()
        return
    content = bytearray(path.read_bytes())
    if how == "truncated":
        path.write_bytes(content[: rng.randrange(len(content))])
    else:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)


@contextlib.contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[None]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=False)


if __name__ == "__main__":
    main()
