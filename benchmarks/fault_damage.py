"""Files that are damaged, gone, or something else than a file; and runs that diverge, share a folder, or lose a disk or
a link. Part of benchmarks/faults.py."""

import contextlib
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from cluster_in_a_box import check_requirements, cluster, programs
from common import ROOT
from fault_campaign import Campaign, Outcomes, bad
from fault_runs import ITERATIONS, NODES, PATIENCE, RANKS, enters

from megatron_zpp.checkpoint import candidates, problems


def damaged_checkpoint(campaign: Campaign, folder: Path, at_most: int) -> Outcomes:
    """The newest of two checkpoints is damaged: refused by name; and passed over with --load-latest-good."""
    newest = campaign.train_half(folder)
    name = campaign.rng.choice(sorted(path.name for path in newest.iterdir()))
    how = campaign.rng.choice(("truncated", "bit flipped", "missing", "metadata missing"))
    if how == "metadata missing":
        name = campaign.rng.choice(("meta.json", "index.json", "complete"))
    spoil(newest / name, how, campaign.rng)
    refused = campaign.start(folder).wait()
    if not refused.failed_with(2) or newest.name not in refused.output:
        return [bad("wrong", refused, f"{name} {how}: not refused")]
    outcome, detail = campaign.finish(folder, "--load-latest-good")
    return [(outcome, f"{name} {how}: refused by name; with --load-latest-good: {detail}")]


def special_file(campaign: Campaign, folder: Path, at_most: int) -> Outcomes:
    """A file of the checkpoint's folder is a FIFO, a link or a folder: refused by name, and nothing is touched."""
    newest, kept = campaign.train_half(folder), folder / "kept"
    paths = [newest / "meta.json", newest / "index.json", folder / "latest_checkpointed_iteration.txt", folder / "lock"]
    path = campaign.rng.choice(paths)
    if path.exists():
        path.rename(kept)
    else:
        kept.write_text("somebody's file")
    before, how = kept.read_bytes(), campaign.rng.choice(("FIFO", "link", "folder"))
    {"FIFO": os.mkfifo, "link": lambda path: path.symlink_to(kept), "folder": os.mkdir}[how](path)
    refused = campaign.start(folder).wait()
    if not refused.failed_with(2) or path.name not in refused.output or kept.read_bytes() != before:
        return [bad("wrong", refused, f"{path.name}, a {how}")]
    path.rmdir() if how == "folder" else path.unlink()
    kept.rename(path)
    outcome, detail = campaign.finish(folder)
    return [(outcome, f"{path.name}, a {how}: refused by name; put back: {detail}")]


def damaged_data(campaign: Campaign, folder: Path, at_most: int) -> Outcomes:
    """A file of the data is cut, emptied or gone, before or while it is read: reported by name."""
    corpus = folder / "corpus" / campaign.corpus.name
    shutil.copytree(campaign.corpus.parent, corpus.parent)
    suffix, mapped = campaign.rng.choice((".bin", ".bin", ".idx")), campaign.rng.random() < 0.5
    victim = corpus.with_name(corpus.name + suffix)
    how = campaign.rng.choice(("truncated", "truncated", "emptied", "missing"))
    while_reading = suffix == ".bin" and how != "missing" and campaign.rng.random() < 0.3
    reader = [] if mapped else ["--no-mmap-bin-files"]
    what = f"{suffix} {how}{' while it is read' * while_reading}, {'mapped' if mapped else 'read'}"
    if not while_reading:
        spoil(victim, how, campaign.rng)
    run = campaign.start(folder, *reader, corpus=corpus, slow={"step": 0.3} if while_reading else {})
    if while_reading:
        run.wait_for(enters(0, "step"), 2)
        spoil(victim, how, campaign.rng)
    result = run.wait()
    if result.hung or not any(result.codes) or victim.name not in result.output:
        return [bad("wrong", result, what)]
    shutil.copy(campaign.corpus.with_name(victim.name), victim)
    outcome, detail = campaign.finish(folder)
    return [(outcome, f"{what}: reported by name; with the file again: {detail}")]


def damaged_cache(campaign: Campaign, folder: Path, at_most: int) -> Outcomes:
    """A file of the index cache is cut, emptied, gone or garbage: built again, with a note."""
    campaign.train_half(folder)
    victim = campaign.rng.choice(sorted((folder / "cache").glob("*/*.npy")))
    how = campaign.rng.choice(("truncated", "emptied", "missing", "garbage"))
    spoil(victim, how, campaign.rng)
    result = campaign.start(folder).wait()
    outcome, detail = campaign.check(folder)
    if not result.well:
        return [bad("lost", result, f"{victim.name} {how}")]
    if "is damaged: it is built again" not in result.output:
        return [bad("wrong", result, f"{victim.name} {how}")]
    return [(outcome, f"{victim.name} {how}: {detail}")]


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


def diverged(campaign: Campaign, folder: Path, at_most: int) -> Outcomes:
    """Parameters turn NaN for good while each step saves: status 3, and the last good checkpoint stays."""
    at, keep = campaign.rng.randrange(2, ITERATIONS - 6), campaign.rng.choice(("1", "2", "3"))
    steps = ["--save-interval", "1", "--save-keep-last", keep, "--max-nonfinite-steps", campaign.rng.choice("459")]
    result = campaign.start(folder, *steps, nan_from=at).wait()
    if not result.failed_with(3):
        return [bad("wrong", result, f"NaN from step {at}")]
    outcome, detail = campaign.finish(folder, "--load-latest-good")
    return [(outcome, f"NaN from step {at}, --save-keep-last {keep}: status 3; with --load-latest-good: {detail}")]


def two_jobs(campaign: Campaign, folder: Path, at_most: int) -> Outcomes:
    """A second job on the folder of a running one is refused; the first goes on."""
    first = campaign.start(folder, "--save-interval", "1", slow={"step": 2.0})
    first.wait_for("consumed samples")
    second = campaign.start(folder, "--save-interval", "1").wait()
    result = first.wait()
    outcome, detail = campaign.check(folder)
    if outcome == "survived" and result.well:
        if not second.failed_with(2) or "is in use by another job" not in second.output:
            return [bad("wrong", second, "the second job was not refused")]
        outcome = "reported"
    return [(outcome, f"the second job was refused; the first: {detail}")]


def disk_full(campaign: Campaign, folder: Path, at_most: int) -> Outcomes:
    """A file system with room for some checkpoints: loud, training goes on, what was saved stays good."""
    with tmpfs(folder, "2m"):
        result = campaign.start(folder, "--save-interval", "1", "--save-keep-last", "100").wait()
        kept = candidates(str(folder))
        damaged = [path.name for path in kept if problems(path)]
        if result.hung or f"iteration {ITERATIONS:8d}/" not in result.output or not result.failed_with(2):
            return [bad("lost", result, "training stopped")]
        if "No space left" not in result.output or "NOT SAVED" not in result.output:
            return [bad("wrong", result, "nothing was said")]
        if damaged or not kept:
            return [("lost", f"damaged: {damaged} of {len(kept)}")]
        subprocess.run(["mount", "-o", "remount,size=50m", folder], check=True)
        outcome, detail = campaign.finish(folder)
    return [(outcome, f"{len(kept)} good checkpoints stayed; with room again: {detail}")]


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
            return [bad("lost", result, "read-only")]
        outcome, detail = campaign.finish(folder)
    return [(outcome, f"writable again: {detail}")]


def killed_link(campaign: Campaign, folder: Path, at_most: int) -> Outcomes:
    """A node's link goes down for good: all ranks end in time, and the next start goes on."""
    check_requirements()
    with (
        cluster(NODES, None) as namespaces,
        programs([str(ROOT / "pretrain_gpt.py"), *campaign.command(folder)], namespaces, RANKS // NODES) as nodes,
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
                return [("hung", f"a node was still there {time.monotonic() - down:.0f} s after the link went down")]
        ended = time.monotonic() - down
    finished = f"saved checkpoint from iteration      {ITERATIONS}" in "".join(outputs)
    named = [line for line in "".join(outputs).splitlines() if line.startswith("error: rank")]
    outcome, detail = campaign.finish(folder)
    what = "was over before" if finished else (named or ["nothing was said"])[0][:120]
    return [(outcome, f"all ended {ended:.0f} s after the link went down ({what}); started again: {detail}")]


@contextlib.contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[None]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=False)
