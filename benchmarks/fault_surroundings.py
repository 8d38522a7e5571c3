"""Runs that diverge, share a folder, or lose their disk or their link. Part of benchmarks/faults.py."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from cluster_in_a_box import check_requirements, cluster, programs
from fault_campaign import ROOT, Campaign, Outcomes
from fault_runs import ITERATIONS, PATIENCE, RANKS

from megatron_zpp.checkpoint import candidates, problems


def diverged(campaign: Campaign, folder: Path, at_most: int) -> Outcomes:
    """Parameters turn NaN for good while each step saves: status 3, and the last good checkpoint stays."""
    at, keep = campaign.rng.randrange(2, ITERATIONS - 6), campaign.rng.choice(("1", "2", "3"))
    steps = ["--save-interval", "1", "--save-keep-last", keep, "--max-nonfinite-steps", campaign.rng.choice("459")]
    result = campaign.start(folder, *steps, nan_from=at).wait()
    if result.hung or set(result.codes) != {3}:
        yield (
            "hung" if result.hung else "wrong",
            f"NaN from step {at}: status {result.codes} {result.output[-300:]}",
        )
        return
    outcome, detail = campaign.finish(folder, "--load-latest-good")
    yield outcome, f"NaN from step {at}, --save-keep-last {keep}: status 3; with --load-latest-good: {detail}"


def two_jobs(campaign: Campaign, folder: Path, at_most: int) -> Outcomes:
    """A second job on the folder of a running one is refused; the first goes on."""
    first = campaign.start(folder, "--save-interval", "1", slow={"step": 2.0})
    first.wait_for("consumed samples")
    second = campaign.start(folder, "--save-interval", "1").wait()
    result = first.wait()
    outcome, detail = campaign.check(folder)
    if outcome == "survived" and result.well:
        if set(second.codes) != {2} or "is in use by another job" not in second.output:
            yield "wrong", f"the second job was not refused: {second.codes} {second.output[-300:]}"
            return
        outcome = "reported"
    yield outcome, f"the second job was refused; the first: {detail}"


def disk_full(campaign: Campaign, folder: Path, at_most: int) -> Outcomes:
    """A file system with room for some checkpoints: loud, training goes on, what was saved stays good."""
    with tmpfs(folder, "2m"):
        result = campaign.start(folder, "--save-interval", "1", "--save-keep-last", "100").wait()
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
            outcome, detail = campaign.finish(folder)
    yield outcome, f"{len(kept)} good checkpoints stayed; with room again: {detail}"


def read_only(campaign: Campaign, folder: Path, at_most: int) -> Outcomes:
    """The file system turns read-only while the run saves, and later writable again."""
    with tmpfs(folder, "50m"):
        run = campaign.start(folder, "--save-interval", "1", slow={"step": 0.3})
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
            outcome, detail = campaign.finish(folder)
            yield outcome, f"writable again: {detail}"


def killed_link(campaign: Campaign, folder: Path, at_most: int) -> Outcomes:
    """A node's link goes down for good: all ranks end in time, and the next start goes on."""
    check_requirements()
    with (
        cluster(RANKS, None) as namespaces,
        programs([str(ROOT / "pretrain_gpt.py"), *campaign.command(folder)], namespaces, 1) as nodes,
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
    outcome, detail = campaign.finish(folder)
    what = "was over before" if finished else (named or ["nothing was said"])[0][:120]
    yield outcome, f"all ended {ended:.0f} s after the link went down ({what}); started again: {detail}"


@contextlib.contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[None]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=False)
