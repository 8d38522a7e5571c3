"""Files that are damaged, gone, or something else than a file. Part of benchmarks/faults.py."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

from fault_campaign import Campaign, Outcomes
from fault_runs import enters

from megatron_zpp.checkpoint import candidates


def damaged_checkpoint(campaign: Campaign, folder: Path, at_most: int) -> Outcomes:
    """The newest of two checkpoints is damaged: refused by name; and passed over with --load-latest-good."""
    half = campaign.start(folder, "--save-interval", "3", "--exit-interval", "6").wait()
    assert half.well, half.output
    newest = candidates(str(folder))[0]
    name = campaign.rng.choice(sorted(path.name for path in newest.iterdir()))
    how = campaign.rng.choice(("truncated", "bit flipped", "missing", "metadata missing"))
    if how == "metadata missing":
        name = campaign.rng.choice(("meta.json", "index.json", "complete"))
    spoil(newest / name, how, campaign.rng)
    refused = campaign.start(folder).wait()
    if refused.hung or set(refused.codes) != {2} or newest.name not in refused.output:
        yield "hung" if refused.hung else "wrong", f"{name} {how}: not refused: {refused.output[-300:]}"
        return
    outcome, detail = campaign.finish(folder, "--load-latest-good")
    yield outcome, f"{name} {how}: refused by name; with --load-latest-good: {detail}"


def special_file(campaign: Campaign, folder: Path, at_most: int) -> Outcomes:
    """A file of the checkpoint's folder is a FIFO, a link or a folder: refused by name, and nothing is touched."""
    half = campaign.start(folder, "--save-interval", "3", "--exit-interval", "6").wait()
    assert half.well, half.output
    newest = candidates(str(folder))[0]
    path = campaign.rng.choice(
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
    before, how = kept.read_bytes(), campaign.rng.choice(("FIFO", "link", "folder"))
    {"FIFO": os.mkfifo, "link": lambda path: path.symlink_to(kept), "folder": os.mkdir}[how](path)
    refused = campaign.start(folder).wait()
    if refused.hung or set(refused.codes) != {2} or path.name not in refused.output or kept.read_bytes() != before:
        yield "hung" if refused.hung else "wrong", f"{path.name}, a {how}: {refused.output[-300:]}"
        return
    path.rmdir() if how == "folder" else path.unlink()
    kept.rename(path)
    outcome, detail = campaign.finish(folder)
    yield outcome, f"{path.name}, a {how}: refused by name; put back: {detail}"


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
    if while_reading:
        run = campaign.start(folder, *reader, corpus=corpus, slow={"step": 0.3})
        run.wait_for(enters(0, "step"), 2)
        spoil(victim, how, campaign.rng)
    else:
        spoil(victim, how, campaign.rng)
        run = campaign.start(folder, *reader, corpus=corpus)
    result = run.wait()
    if result.hung or not any(result.codes) or victim.name not in result.output:
        yield "hung" if result.hung else "wrong", f"{what}: {result.codes} {result.output[-300:]}"
        return
    shutil.copy(campaign.corpus.with_name(victim.name), victim)
    outcome, detail = campaign.finish(folder)
    yield outcome, f"{what}: reported by name; with the file again: {detail}"


def damaged_cache(campaign: Campaign, folder: Path, at_most: int) -> Outcomes:
    """A file of the index cache is cut, emptied, gone or garbage: built again, with a note."""
    half = campaign.start(folder, "--save-interval", "3", "--exit-interval", "6").wait()
    assert half.well, half.output
    victim = campaign.rng.choice(sorted((folder / "cache").glob("*/*.npy")))
    how = campaign.rng.choice(("truncated", "emptied", "missing", "garbage"))
    spoil(victim, how, campaign.rng)
    result = campaign.start(folder).wait()
    outcome, detail = campaign.check(folder)
    if not result.well:
        outcome = "hung" if result.hung else "lost"
    elif "is damaged: it is built anew" not in result.output:
        outcome = "wrong"
    yield outcome, f"{victim.name} {how}: {detail}" + (result.output[-300:] if outcome != "survived" else "")


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
