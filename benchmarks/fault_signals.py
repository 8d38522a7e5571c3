"""Ranks are killed or asked to stop: survived if the run ends as the undisturbed one. Part of benchmarks/faults.py."""

import shutil
import signal
from pathlib import Path

from fault_campaign import Campaign, Outcomes, bad
from fault_runs import ITERATIONS, RANKS, Result, Run, enters

SECONDS_TO_STOP = 10.0  # from SIGTERM until all is saved and all ranks have ended


def finished(campaign: Campaign, folder: Path, hits: Outcomes) -> Outcomes:
    """The outcomes of all faults that hit a run, once it has been started again and has come to its end."""
    end, detail = campaign.finish(folder)
    return [(outcome if outcome != "survived" else end, f"{what}; {detail}") for outcome, what in hits]


def kills(campaign: Campaign, folder: Path, at_most: int) -> Outcomes:
    """SIGKILL to a rank at a time drawn from the whole run, start and saves included, up to 8 times."""
    hits: Outcomes = []
    for _ in range(min(at_most, 8)):
        rank, after = campaign.rng.randrange(RANKS), campaign.rng.uniform(0.0, campaign.run_seconds)
        run = campaign.start(folder, "--save-interval", str(campaign.rng.choice((1, 1, 2))))
        where = run.hit(rank, signal.SIGKILL, after)
        result = run.wait()
        if where is None:
            break  # it was over before
        hits.append(("hung" if result.hung else "survived", f"rank {rank} after {after:.2f} s, {where}"))
    return finished(campaign, folder, hits)


def stops(campaign: Campaign, folder: Path, at_most: int) -> Outcomes:
    """SIGTERM or SIGUSR1 to one rank at a time drawn from the steps."""
    hits: Outcomes = []
    for _ in range(min(at_most, 4)):
        rank, number = campaign.rng.randrange(RANKS), campaign.rng.choice((signal.SIGTERM, signal.SIGUSR1))
        run = campaign.start(folder, "--save-interval", "1000")
        if not run.wait_for("consumed samples"):
            result = run.wait()
            if not result.well:
                hits.append(bad("lost", result, "no first step"))
            break  # else the run had come to its end before
        where = run.hit(rank, number, campaign.rng.uniform(0.0, 0.1))
        result = run.wait()
        if where is None:
            break
        hits.append((stopped(result), f"{number.name} to rank {rank}, {where}; status {result.codes}"))
    return finished(campaign, folder, hits)


def kills_in_a_place(campaign: Campaign, folder: Path, at_most: int) -> Outcomes:
    """SIGKILL to a rank that builds the index, loads, encodes or applies moved codes, evaluates or saves."""
    moves = ["encoding of moved codes", "applying of moved codes"]
    places = ["building the index", "load", *moves, "evaluation", "save"]
    return in_places(campaign, folder, signal.SIGKILL, "1", places, at_most)


def stops_in_a_place(campaign: Campaign, folder: Path, at_most: int) -> Outcomes:
    """SIGTERM to one rank, in any place of a run."""
    places = ["building the index", "load", "step", "evaluation", "save"]
    return in_places(campaign, folder, signal.SIGTERM, "3", places, at_most)


def in_places(
    campaign: Campaign, folder: Path, number: signal.Signals, save_interval: str, places: list[str], at_most: int
) -> Outcomes:
    """A signal in each place, in the order in which a run of two starts and more comes by: the first loads nothing."""
    hits: Outcomes = []
    for place in campaign.rng.sample(places, k=len(places))[:at_most]:
        if place == "building the index":
            shutil.rmtree(folder / "cache", ignore_errors=True)
        # A run that is asked to stop meets an evaluation that alone takes longer than it may take to stop.
        is_slow = place == "evaluation" and number == signal.SIGTERM
        run = campaign.start(
            folder, "--save-interval", save_interval, slow={"evaluated micro-batch": 2.0} if is_slow else {}
        )
        where = hit_in(campaign, run, place, number)
        result = run.wait()
        if where is not None:
            killed = "hung" if result.hung else "survived"
            outcome = killed if number == signal.SIGKILL else stopped(result)
            hits.append((outcome, f"{where}, ended in {result.seconds_after_hit:.1f} s, status {result.codes}"))
    return finished(campaign, folder, hits)


def hit_in(campaign: Campaign, run: Run, place: str, number: signal.Signals) -> str | None:
    """Send a signal to a rank that is in a place, for the first or second time; None if it never came there."""
    rank = 0 if place == "building the index" else campaign.rng.randrange(RANKS)
    ranks = range(RANKS) if place == "building the index" else [rank]
    times = 1
    if place in ("step", "evaluation", "save"):
        times = campaign.rng.choice((1, 2))
    elif place.endswith("moved codes"):  # of each unit in each step
        times = campaign.rng.randrange(1, 30)
    if not any(run.wait_for(enters(rank, place), times) for rank in ranks):
        return None
    where = run.hit(rank, number, campaign.rng.uniform(0.0, 0.02))
    return None if where is None else f"{number.name} to rank {rank} for the {place}: {where}"


def stopped(result: Result) -> str:
    """Whether a run that was asked to stop had saved its last step, and ended in time."""
    if result.hung or (result.seconds_after_hit or 0.0) > SECONDS_TO_STOP:
        return "hung"
    if "consumed samples" not in result.output:
        return "survived"  # there was nothing to save
    saved = "exiting program at iteration" in result.output or f"{ITERATIONS}/" in result.output
    return "survived" if result.well and saved and "NOT SAVED" not in result.output else "lost"
