"""What all faults of benchmarks/faults.py share: the undisturbed run, the same command again, the check, the record."""

import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import ROOT, append_row
from fault_runs import ITERATIONS, SETTINGS, Result, Run

from megatron_zpp.checkpoint import candidates, iterate_tensors, read_meta

Outcome = tuple[str, str]  # and its detail
Outcomes = list[Outcome]  # of each fault that hit one run
Fault = Callable[["Campaign", Path, int], Outcomes]  # disturbs the run of one folder, at most that often


class Campaign:
    def __init__(self, folder: Path, rng: random.Random, seed: int, output: Path | None) -> None:
        self.folder, self.rng, self.seed, self.output = folder, rng, seed, output
        self.corpus = folder / "corpus" / "docs_text_document"
        self.outcomes: dict[str, Counter[str]] = {}  # by kind
        self.begun = time.monotonic()

    def prepare(self) -> None:
        """The text, and the undisturbed run."""
        text = sorted(str(path) for path in (ROOT / "docs").glob("*/*.md"))
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

    def train_half(self, folder: Path) -> Path:
        """Train until two checkpoints are saved; return the newest."""
        half = self.start(folder, "--save-interval", "3", "--exit-interval", "6").wait()
        assert half.well, half.output
        return candidates(str(folder))[0]

    def check(self, folder: Path) -> Outcome:
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

    def finish(self, folder: Path, *more: str) -> Outcome:
        """The same command once more, undisturbed, and the check."""
        result = self.start(folder, *more).wait()
        return self.check(folder) if result.well else bad("lost", result, "could not go on")

    def repeat(self, kind: str, number: int, disturb: Fault) -> None:
        """Runs of their own folder that are disturbed, until so many faults have hit one."""
        done = run = 0
        while done < number:
            run += 1
            folder, begun = self.folder / f"{kind} {run}", time.monotonic()
            for outcome, detail in disturb(self, folder, number - done):
                done += 1
                self.record(kind, done, outcome, f"run {run}: {detail}", time.monotonic() - begun)
                begun = time.monotonic()
            shutil.rmtree(folder, ignore_errors=True)

    def record(self, kind: str, number: int, outcome: str, detail: str, seconds: float) -> None:
        self.outcomes.setdefault(kind, Counter())[outcome] += 1
        print(f"{time.monotonic() - self.begun:7.1f} s  {kind} {number}: {outcome} ({detail})"[:240], flush=True)
        row = {"kind": kind, "number": number, "outcome": outcome, "detail": detail, "seconds": round(seconds, 2)}
        append_row(self.output, {"seed": self.seed} | row)

    def summary(self) -> None:
        summary = {kind: dict(outcomes) for kind, outcomes in self.outcomes.items()}
        for kind, outcomes in summary.items():
            print(f"{kind:20s} {outcomes}")
        seconds = round(time.monotonic() - self.begun, 1)
        append_row(self.output, {"summary": summary, "seed": self.seed, "seconds": seconds})


def bad(outcome: str, result: Result, what: str) -> Outcome:
    """What became of a run that did not do what it should; a run that hung is "hung"."""
    return "hung" if result.hung else outcome, f"{what}: status {result.codes}: {result.output[-300:]}"
