"""A fault campaign: runs are killed, stopped, robbed of their files, and must end as if nothing had happened.

    sudo .venv/bin/python benchmarks/faults.py --seed 1 --output benchmarks/results/faults.jsonl

One small GPT is trained on 2 ranks on real text, with dropout, LoCo, evaluations and a save at every step or two, once
undisturbed and then many times with faults that are drawn from the seed. After each fault the same command is started
again, and in the end all parameters and the optimizer must be those of the undisturbed run, bit for bit. Each case is
one line of the output:

    survived   went on by itself, or with the same command, and ended bit-identical
    reported   stopped with an error that names the cause, and changed nothing (damage, a folder in use, no room)
    lost, hung, wrong   what must not happen

The killed link runs real torchrun in the cluster in a box. Disk full, read-only folder and killed link need root, and
are left out with a note elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import shutil
import signal
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
from fault_runs import ITERATIONS, PATIENCE, RANKS, SETTINGS, Result, Run, enters, preload  # noqa: E402

from megatron_zpp.checkpoint import candidates, iterate_tensors, problems, read_meta  # noqa: E402

SECONDS_TO_STOP = 10.0  # from SIGTERM until all is saved and all ranks have ended
NEED_ROOT = ("disk full", "read-only", "killed link")


@dataclass
class Case:
    kind: str
    number: int
    outcome: str
    detail: str
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", metavar="KIND", help="these kinds of faults; default: all")
    parser.add_argument("--share", type=float, default=1.0, help="of the number of faults of each kind")
    parser.add_argument("--output", type=Path, help="append one JSON line for each case, and a summary")
    arguments = parser.parse_args()
    preload()
    with tempfile.TemporaryDirectory(prefix="faults") as folder:
        campaign = Campaign(Path(folder), random.Random(arguments.seed), arguments.seed, arguments.output)
        campaign.prepare()
        for kind, (number, disturb) in campaign.kinds().items():
            if arguments.only is not None and kind not in arguments.only:
                continue
            if kind in NEED_ROOT and os.geteuid() != 0:
                print(f"left out without root: {kind}")
                continue
            campaign.repeat(kind, max(1, round(number * arguments.share)), disturb)
        campaign.summary()


Outcomes = Iterator[tuple[str, str]]  # outcome and detail of each fault that hit one run


class Campaign:
    def __init__(self, folder: Path, rng: random.Random, seed: int, output: Path | None) -> None:
        self.folder, self.rng, self.seed, self.output = folder, rng, seed, output
        self.corpus = folder / "corpus" / "docs_text_document"
        self.cases: list[Case] = []
        self.begun = time.monotonic()

    def kinds(self) -> dict[str, tuple[int, Callable[[Path, int], Outcomes]]]:
        """How often each kind is tried, and what does it to one run: at most so many times."""
        return {
            "kill": (100, self.kills),
            "kill in a place": (80, self.kills_in_a_place),
            "stop": (20, self.stops),
            "stop in a place": (50, self.stops_in_a_place),
            "damaged checkpoint": (24, self.damaged_checkpoint),
            "special file": (12, self.special_file),
            "damaged data": (24, self.damaged_data),
            "damaged cache": (20, self.damaged_cache),
            "diverged": (8, self.diverged),
            "two jobs": (2, self.two_jobs),
            "disk full": (2, self.disk_full),
            "read-only": (2, self.read_only),
            "killed link": (2, self.killed_link),
        }

    def prepare(self) -> None:
        """The text, and the undisturbed run."""
        text = sorted(str(path) for path in (ROOT / "docs").glob("*.md"))
        preprocess = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--tokenizer-type", "ByteTokenizer"]
        self.corpus.parent.mkdir()
        prefix = str(self.corpus).removesuffix("_text_document")
        subprocess.run([*preprocess, "--input", *text, "--output-prefix", prefix, "--append-eod"], check=True)
        for name in ("warm-up", "reference"):  # the first one waits for the import of torch
            result = self.start(self.folder / name).wait()
            assert result.well, result.output
        self.run_seconds = result.seconds
        print(f"undisturbed: {result.seconds:.1f} s")

    def command(self, folder: Path, *more: str, corpus: Path | None = None) -> list[str]:
        save = ["--save", str(folder), "--load", str(folder), "--save-interval", "2"]
        data = ["--data-path", str(corpus or self.corpus), "--data-cache-path", str(folder / "cache")]
        return [*SETTINGS.split(), *save, *data, *more]

    def start(self, folder: Path, *more: str, corpus: Path | None = None, **faults: Any) -> Run:
        return Run(self.command(folder, *more, corpus=corpus), **faults)

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
            return "wrong", f"counters {metas[0]['counters']} instead of {metas[1]['counters']}"
        return "survived", f"{names} tensors bit-identical"

    def finish(self, folder: Path, *more: str) -> tuple[str, str]:
        """The same command once more, undisturbed, and the check."""
        result = self.start(folder, *more).wait()
        if not result.well:
            outcome = "hung" if result.hung else "lost"
            return outcome, f"could not go on: status {result.codes}: {result.output[-500:]}"
        return self.check(folder)

    def repeat(self, kind: str, number: int, disturb: Callable[[Path, int], Outcomes]) -> None:
        """Runs of their own folder that are disturbed, until so many faults have hit one."""
        done = run = 0
        while done < number:
            run += 1
            folder, begun = self.folder / f"{kind} {run}", time.monotonic()
            for outcome, detail in disturb(folder, number - done):
                done += 1
                self.record(kind, done, outcome, f"run {run}: {detail}", time.monotonic() - begun)
                begun = time.monotonic()
            shutil.rmtree(folder, ignore_errors=True)

    def record(self, kind: str, number: int, outcome: str, detail: str, seconds: float) -> None:
        case = Case(kind, number, outcome, detail, round(seconds, 2))
        self.cases.append(case)
        print(f"{time.monotonic() - self.begun:7.1f} s  {kind} {number}: {outcome} ({detail})"[:240], flush=True)
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
            print(f"{kind:20s} {dict(outcomes)}")
        self.write(
            {
                "summary": {kind: dict(outcomes) for kind, outcomes in table.items()},
                "seed": self.seed,
                "seconds": round(time.monotonic() - self.begun, 1),
                "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
            }
        )

    # Killed and stopped runs. A fault was survived if its run ended as the undisturbed one.

    def disturbed(self, folder: Path, faults: Outcomes) -> Outcomes:
        pending = list(faults)
        end, detail = self.finish(folder)
        for outcome, what in pending:
            yield (outcome if outcome != "survived" else end), f"{what}; {detail}"

    def kills(self, folder: Path, at_most: int) -> Outcomes:
        """SIGKILL to a rank at a time drawn from the whole run, start and saves included, up to 8 times."""

        def faults() -> Outcomes:
            for _ in range(min(at_most, 8)):
                rank, after = self.rng.randrange(RANKS), self.rng.uniform(0.0, self.run_seconds)
                run = self.start(folder, "--save-interval", str(self.rng.choice((1, 1, 2))))
                where = run.hit(rank, signal.SIGKILL, after)
                result = run.wait()
                if where is None:
                    break  # it was over before
                yield "hung" if result.hung else "survived", f"rank {rank} after {after:.2f} s, {where}"

        yield from self.disturbed(folder, faults())

    def kills_in_a_place(self, folder: Path, at_most: int) -> Outcomes:
        """SIGKILL to a rank that builds the index, loads, evaluates or saves."""

        def faults() -> Outcomes:
            for place in self.places(at_most, "building the index", "load", "evaluation", "save"):
                if place == "building the index":
                    shutil.rmtree(folder / "cache", ignore_errors=True)
                run = self.start(folder, "--save-interval", "1")
                hit = self.hit_in(run, place, signal.SIGKILL)
                result = run.wait()
                if hit is not None:
                    yield "hung" if result.hung else "survived", hit

        yield from self.disturbed(folder, faults())

    def stops(self, folder: Path, at_most: int) -> Outcomes:
        """SIGTERM or SIGUSR1 to one rank at a time drawn from the steps."""

        def faults() -> Outcomes:
            for _ in range(min(at_most, 4)):
                rank, number = self.rng.randrange(RANKS), self.rng.choice((signal.SIGTERM, signal.SIGUSR1))
                run = self.start(folder, "--save-interval", "1000")
                if not run.wait_for("consumed samples"):
                    result = run.wait()
                    if not result.well:
                        yield "hung" if result.hung else "lost", f"no first step: status {result.codes}"
                    return  # else the run had come to its end before
                where = run.hit(rank, number, self.rng.uniform(0.0, 0.1))
                result = run.wait()
                if where is None:
                    return
                yield self.stopped(run, result), f"{number.name} to rank {rank}, {where}; status {result.codes}"

        yield from self.disturbed(folder, faults())

    def stops_in_a_place(self, folder: Path, at_most: int) -> Outcomes:
        """SIGTERM to one rank, in any place of a run."""

        def faults() -> Outcomes:
            for place in self.places(at_most, "building the index", "load", "step", "evaluation", "save"):
                if place == "building the index":
                    shutil.rmtree(folder / "cache", ignore_errors=True)
                # An evaluation that alone takes longer than a run may take to stop.
                run = self.start(
                    folder, "--save-interval", "3", slow={"evaluated micro-batch": 2.0} if place == "evaluation" else {}
                )
                hit = self.hit_in(run, place, signal.SIGTERM)
                result = run.wait()
                if hit is not None:
                    seconds = f"ended in {result.seconds_after_hit:.1f} s"
                    yield self.stopped(run, result), f"{hit}, {seconds}, status {result.codes}"

        yield from self.disturbed(folder, faults())

    def places(self, at_most: int, *places: str) -> list[str]:
        """In the order in which a run of two starts and more comes by: the first has nothing to load."""
        return self.rng.sample(places, k=len(places))[:at_most]

    def hit_in(self, run: Run, place: str, number: signal.Signals) -> str | None:
        """Send a signal to a rank that is in a place, for the first or second time; None if it never came there."""
        rank = 0 if place == "building the index" else self.rng.randrange(RANKS)
        ranks = range(RANKS) if place == "building the index" else [rank]
        times = self.rng.choice((1, 2)) if place in ("step", "evaluation", "save") else 1
        if not any(run.wait_for(enters(rank, place), times) for rank in ranks):
            return None
        where = run.hit(rank, number, self.rng.uniform(0.0, 0.02))
        return None if where is None else f"{number.name} to rank {rank} for the {place}: {where}"

    def stopped(self, run: Run, result: Result) -> str:
        """Whether a run that was asked to stop had saved its last step, and ended in time."""
        if result.hung or (result.seconds_after_hit or 0.0) > SECONDS_TO_STOP:
            return "hung"
        if "consumed samples" not in result.output:
            return "survived"  # there was nothing to save
        saved = "exiting program at iteration" in result.output or f"{ITERATIONS}/" in result.output
        return "survived" if result.well and saved and "NOT SAVED" not in result.output else "lost"

    # Damage to files

    def damaged_checkpoint(self, folder: Path, at_most: int) -> Outcomes:
        """The newest of two checkpoints is damaged: refused by name; and passed over with --load-latest-good."""
        half = self.start(folder, "--save-interval", "3", "--exit-interval", "6").wait()
        assert half.well, half.output
        newest = candidates(str(folder))[0]
        name = self.rng.choice(sorted(path.name for path in newest.iterdir()))
        how = self.rng.choice(("truncated", "bit flipped", "missing", "metadata missing"))
        if how == "metadata missing":
            name = self.rng.choice(("meta.json", "index.json", "complete"))
        spoil(newest / name, how, self.rng)
        refused = self.start(folder).wait()
        if refused.hung or set(refused.codes) != {2} or newest.name not in refused.output:
            yield "hung" if refused.hung else "wrong", f"{name} {how}: not refused: {refused.output[-300:]}"
            return
        outcome, detail = self.finish(folder, "--load-latest-good")
        yield outcome, f"{name} {how}: refused by name; with --load-latest-good: {detail}"

    def special_file(self, folder: Path, at_most: int) -> Outcomes:
        """A file of the checkpoint's folder is a FIFO, a link or a folder: refused by name, and nothing is touched."""
        half = self.start(folder, "--save-interval", "3", "--exit-interval", "6").wait()
        assert half.well, half.output
        newest = candidates(str(folder))[0]
        path = self.rng.choice(
            (
                newest / "meta.json",
                newest / "index.json",
                folder / "latest_checkpointed_iteration.txt",
                folder / "lock",
            )
        )
        kept = folder / "kept"
        if path.exists():
            path.rename(kept)
        else:
            kept.write_text("somebody's file")
        before, how = kept.read_bytes(), self.rng.choice(("FIFO", "link", "folder"))
        {"FIFO": os.mkfifo, "link": lambda path: path.symlink_to(kept), "folder": os.mkdir}[how](path)
        refused = self.start(folder).wait()
        if refused.hung or set(refused.codes) != {2} or path.name not in refused.output or kept.read_bytes() != before:
            yield "hung" if refused.hung else "wrong", f"{path.name}, a {how}: {refused.output[-300:]}"
            return
        path.rmdir() if how == "folder" else path.unlink()
        kept.rename(path)
        outcome, detail = self.finish(folder)
        yield outcome, f"{path.name}, a {how}: refused by name; put back: {detail}"

    def damaged_data(self, folder: Path, at_most: int) -> Outcomes:
        """A file of the data is cut, emptied or gone, before or while it is read: reported by name."""
        corpus = folder / "corpus" / self.corpus.name
        shutil.copytree(self.corpus.parent, corpus.parent)
        suffix, mapped = self.rng.choice((".bin", ".bin", ".idx")), self.rng.random() < 0.5
        victim = corpus.with_name(corpus.name + suffix)
        how = self.rng.choice(("truncated", "truncated", "emptied", "missing"))
        while_reading = suffix == ".bin" and how != "missing" and self.rng.random() < 0.3
        reader = [] if mapped else ["--no-mmap-bin-files"]
        what = f"{suffix} {how}{' while it is read' * while_reading}, {'mapped' if mapped else 'read'}"
        if while_reading:
            run = self.start(folder, *reader, corpus=corpus, slow={"step": 0.3})
            run.wait_for(enters(0, "step"), 2)
            spoil(victim, how, self.rng)
        else:
            spoil(victim, how, self.rng)
            run = self.start(folder, *reader, corpus=corpus)
        result = run.wait()
        if result.hung or not any(result.codes) or victim.name not in result.output:
            yield "hung" if result.hung else "wrong", f"{what}: {result.codes} {result.output[-300:]}"
            return
        shutil.copy(self.corpus.with_name(victim.name), victim)
        outcome, detail = self.finish(folder)
        yield outcome, f"{what}: reported by name; with the file again: {detail}"

    def damaged_cache(self, folder: Path, at_most: int) -> Outcomes:
        """A file of the index cache is cut, emptied, gone or garbage: built again, with a note."""
        half = self.start(folder, "--save-interval", "3", "--exit-interval", "6").wait()
        assert half.well, half.output
        victim = self.rng.choice(sorted((folder / "cache").glob("*/*.npy")))
        how = self.rng.choice(("truncated", "emptied", "missing", "garbage"))
        spoil(victim, how, self.rng)
        result = self.start(folder).wait()
        outcome, detail = self.check(folder)
        if not result.well:
            outcome = "hung" if result.hung else "lost"
        elif "is damaged: it is built anew" not in result.output:
            outcome = "wrong"
        yield outcome, f"{victim.name} {how}: {detail}" + (result.output[-300:] if outcome != "survived" else "")

    # Whole runs

    def diverged(self, folder: Path, at_most: int) -> Outcomes:
        """Parameters turn NaN for good while each step saves: status 3, and the last good checkpoint stays."""
        at, keep = self.rng.randrange(2, ITERATIONS - 6), self.rng.choice(("1", "2", "3"))
        steps = ["--save-interval", "1", "--save-keep-last", keep, "--max-nonfinite-steps", self.rng.choice("459")]
        result = self.start(folder, *steps, nan_from=at).wait()
        if result.hung or set(result.codes) != {3}:
            yield (
                "hung" if result.hung else "wrong",
                f"NaN from step {at}: status {result.codes} {result.output[-300:]}",
            )
            return
        outcome, detail = self.finish(folder, "--load-latest-good")
        yield outcome, f"NaN from step {at}, --save-keep-last {keep}: status 3; with --load-latest-good: {detail}"

    def two_jobs(self, folder: Path, at_most: int) -> Outcomes:
        """A second job on the folder of a running one is refused; the first goes on."""
        first = self.start(folder, "--save-interval", "1", slow={"step": 2.0})
        first.wait_for("consumed samples")
        second = self.start(folder, "--save-interval", "1").wait()
        result = first.wait()
        outcome, detail = self.check(folder)
        if outcome == "survived" and result.well:
            if set(second.codes) != {2} or "is in use by another job" not in second.output:
                yield "wrong", f"the second job was not refused: {second.codes} {second.output[-300:]}"
                return
            outcome = "reported"
        yield outcome, f"the second job was refused; the first: {detail}"

    def disk_full(self, folder: Path, at_most: int) -> Outcomes:
        """A file system with room for some checkpoints: loud, training goes on, what was saved stays good."""
        with tmpfs(folder, "2m"):
            result = self.start(folder, "--save-interval", "1", "--save-keep-last", "100").wait()
            kept = candidates(str(folder))
            damaged = [path.name for path in kept if problems(path)]
            if result.hung or f"iteration {ITERATIONS:8d}/" not in result.output or set(result.codes) != {2}:
                outcome, detail = "hung" if result.hung else "lost", f"training stopped: {result.output[-300:]}"
            elif "No space left" not in result.output or "NOT SAVED" not in result.output:
                outcome, detail = "wrong", f"nothing was said: {result.output[-300:]}"
            elif damaged or not kept:
                outcome, detail = "lost", f"damaged: {damaged} of {len(kept)}"
            else:
                subprocess.run(["mount", "-o", "remount,size=50m", folder], check=True)
                outcome, detail = self.finish(folder)
        yield outcome, f"{len(kept)} good checkpoints stayed; with room again: {detail}"

    def read_only(self, folder: Path, at_most: int) -> Outcomes:
        """The file system turns read-only while the run saves, and later writable again."""
        with tmpfs(folder, "50m"):
            run = self.start(folder, "--save-interval", "1", slow={"step": 0.3})
            run.wait_for("successfully saved checkpoint")
            # Laid over it: a file system with open files does not let itself be made read-only.
            subprocess.run(["mount", "--bind", folder, folder], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
            result = run.wait()
            said = "Read-only file system" in result.output and "NOT SAVED" in result.output
            subprocess.run(["umount", folder], check=True)
            if result.hung or f"iteration {ITERATIONS:8d}/" not in result.output or not said:
                yield "hung" if result.hung else "lost", f"{result.codes} {result.output[-300:]}"
            else:
                outcome, detail = self.finish(folder)
                yield outcome, f"writable again: {detail}"

    def killed_link(self, folder: Path, at_most: int) -> Outcomes:
        """A node's link goes down for good: all ranks end in time, and the next start goes on."""
        check_requirements()
        with (
            cluster(RANKS, None) as namespaces,
            programs([str(ROOT / "pretrain_gpt.py"), *self.command(folder)], namespaces, 1) as nodes,
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
                    yield "hung", f"a node was still there {time.monotonic() - down:.0f} s after the link went down"
                    return
            ended = time.monotonic() - down
        finished = f"saved checkpoint from iteration      {ITERATIONS}" in "".join(outputs)
        named = [line for line in "".join(outputs).splitlines() if line.startswith("error: rank")]
        outcome, detail = self.finish(folder)
        what = "was over before" if finished else (named or ["nothing was said"])[0][:120]
        yield outcome, f"all ended {ended:.0f} s after the link went down ({what}); started again: {detail}"


def spoil(path: Path, how: str, rng: random.Random) -> None:
    if "missing" in how:
        path.unlink()
        return
    content = bytearray(path.read_bytes())
    if how == "truncated":
        os.truncate(path, rng.randrange(len(content)))  # in place, under whoever has it open
    elif how == "emptied":
        os.truncate(path, 0)
    elif how == "garbage":
        path.write_bytes(rng.randbytes(len(content)))
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
