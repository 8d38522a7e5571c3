"""Runs what examples/reproduce.toml lists: published results, each by one command, and writes where each stands.

examples/reproduce.sh                 # list the experiments, with the time that each takes
examples/reproduce.sh loco-llama      # run one at laptop scale, then write its tables and plots into docs/
SCALE=full examples/reproduce.sh ...  # the real one; also SCALE=gpu
examples/reproduce.sh --check         # fail if a table in docs/ differs from the kept results
"""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import against_peers
import between_islands
import between_nodes
import finetuning_bits
import kernels
import launches
import memory
import mutants
import papers
import peer_flags
import planner
import planner_box
import rl
import scaling
import study_tables
import time_to_loss
from common import ROOT, markdown_table, new_parser
from study import RESULTS, arms, read_results
from study_arms import SCALES
from study_experiments import EXPERIMENTS
from study_tables import PAGE, Rows, by_flags_and_seed, page_of, table

CLAIMS = ROOT / "examples" / "reproduce.toml"
EVIDENCE, REFERENCE = ROOT / "docs" / "evidence", ROOT / "docs" / "reference"
STUDY = EVIDENCE / "experiments"
HEADINGS = "published", "ours", "how", "verdict"


@cache
def results_of(scale: str) -> list[dict[str, Any]]:
    return read_results(RESULTS, scale)


@cache
def rows_of(scale: str) -> Rows:
    return by_flags_and_seed(results_of(scale))


def table_of(name: str) -> str:
    return table(EXPERIMENTS[name], rows_of(EXPERIMENTS[name].scale)).rstrip()


BLOCKS = between_nodes.BLOCKS | {  # tables that results make, by page and place
    PAGE: {
        "resolution": lambda: study_tables.resolution(EXPERIMENTS["E19"], rows_of("tuned")),
        "headline": partial(table_of, "E19"),
        "time to loss": lambda: time_to_loss.table(rows_of("tuned")),
        "table 5": lambda: papers.table_5(rows_of("tuned")),
        "learning rates": lambda: study_tables.table_of_rates(rows_of("rates")),
    },
    STUDY / "fine-tuning.md": {"fine-tuning": finetuning_bits.table},
    EVIDENCE / "planner.md": {
        "published": lambda: planner.kept("published"),
        "box": planner_box.table,
        "worth": lambda: planner.kept("worth"),
    },
    ROOT / "README.md": {"race": against_peers.readme_table, "prediction": against_peers.readme_prediction},
    EVIDENCE / "peers.md": {
        "seconds": against_peers.table_of_seconds,
        "ratios": against_peers.table_of_ratios,
        "profile": against_peers.table_of_profile,
        "auto": planner_box.table_of_auto,
        "bytes": against_peers.table_of_bytes,
        "flags": peer_flags.table,
    },
    EVIDENCE / "islands.md": {"sites": lambda: planner.kept("islands"), "between-islands": between_islands.table},
    EVIDENCE / "benchmarks.md": {
        "mutants": mutants.table,
        "newer mutants": lambda: mutants.table(mutants.NEWER),
        "learning": rl.table_of_learning,
        "rollouts": rl.table_of_rollouts,
    },
    EVIDENCE / "kernels.md": {"kernels": kernels.table},
    EVIDENCE / "scaling.md": {"scaling": scaling.tables, "launches": launches.table},
    REFERENCE / "memory.md": {"memory": memory.table, "saves": memory.table_of_saves},
    ROOT / "docs" / "how-to" / "choose-settings.md": {"ways": memory.table_of_ways},
    REFERENCE / "recipes.md": {"recipes": lambda: study_tables.table_of_recipes(rows_of("tuned"))},
}


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("name", nargs="?", help="of an experiment; default: list all")
    parser.add_argument("--write", action="store_true", help="write tables of the kept results into docs/")
    parser.add_argument("--check", action="store_true", help="fail if a table in docs/ differs from the kept results")
    args = parser.parse_args()
    claims: dict[str, dict[str, Any]] = tomllib.loads(CLAIMS.read_text())
    if args.check:
        if wrong := [str(path) for path, text in pages(claims).items() if text != path.read_text()]:
            sys.exit(f"error: {', '.join(wrong)}: not what the kept results give; run examples/reproduce.sh --write")
    elif args.write:
        write(claims)
    elif args.name is None:
        found = rows_of_claims(claims)
        verdicts = {name: ", ".join(dict.fromkeys(row[3] for row in rows)) for name, rows in found.items()}
        lines = [[name, verdicts[name], time_of(claim), found[name][0][0]] for name, claim in claims.items()]
        print(markdown_table(["name", "verdicts", "on 2 cores", "published, the first row"], lines))
    elif args.name not in claims:
        parser.error(f"there is no experiment {args.name}; choose one of {', '.join(claims)}")
    else:
        scale = os.environ.get("SCALE", "laptop")
        if scale not in claims[args.name]:
            parser.error(f"{args.name} has no SCALE={scale}")
        for command in claims[args.name][scale]:
            print(f"+ {command}", flush=True)
            subprocess.run(command, shell=True, check=True, cwd=ROOT)
        results_of.cache_clear()  # the commands added rows
        rows_of.cache_clear()
        write(claims)
        print(markdown_table(HEADINGS, rows_of_claims(claims)[args.name]))


def rows_of_claims(claims: Mapping[str, Mapping[str, Any]]) -> dict[str, list[papers.Row]]:
    """Return the lines of the papers' pages by experiment: from ``papers.py``, then the experiment's own."""
    made = papers.rows(rows_of("cpu"), rows_of("tuned"))
    assert set(made) <= set(claims)
    found = {name: made.get(name, []) for name in claims}
    for name, claim in claims.items():
        if "published" in claim:
            said = f"{claim['published']} ({claim['source']})"
            found[name] = [*found[name], (said, claim["here"], f"`{name}`", claim["state"])]
    return found


def write(claims: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the tables of the kept results and of all claims into their pages."""
    for path, text in pages(claims).items():
        path.write_text(text)


def pages(claims: Mapping[str, Mapping[str, Any]]) -> dict[Path, str]:
    """Return the pages with the tables of the kept results and of all claims."""
    found, blocks = rows_of_claims(claims), dict(BLOCKS)
    for paper, page in (("zeropp", "zeropp-paper"), ("loco", "loco-paper"), ("sdp4bit", "published-results")):
        lines = [row for name in found if name.startswith(paper) for row in found[name]]
        blocks[EVIDENCE / f"{page}.md"] = {"claims": partial(markdown_table, HEADINGS, lines)}
    texts = {STUDY / f"{name.lower()}.md": page_of(name, rows_of(e.scale)) for name, e in EXPERIMENTS.items()}
    texts[STUDY / "sizes.svg"] = study_tables.plot_of_sizes(rows_of)
    for path, tables in blocks.items():
        texts[path] = path.read_text()
        for name, make in tables.items():
            texts[path] = replace_block(texts[path], name, f"{make()}\n")
    return texts


def replace_block(page: str, name: str, text: str) -> str:
    """``page`` with ``text`` between <!-- NAME --> and <!-- end of NAME -->."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    assert begin in page and end in page, f"the page has no place for {name}"
    return re.sub(f"{begin}.*?{end}", lambda _: f"{begin}{text}{end}", page, flags=re.DOTALL)


def time_of(claim: Mapping[str, Any]) -> str:
    """Return how long the laptop's commands take: the study's as long as the kept results took."""
    names = re.findall(r"\bE\d+\b", " ".join(claim["laptop"]))
    seconds = 0.0
    for scale in {EXPERIMENTS[name].scale for name in names}:
        flags = {arm.flags for arm in arms([name for name in names if EXPERIMENTS[name].scale == scale])}
        took = sum(row.get("seconds", 0) for row in results_of(scale) if row["flags"] in flags)
        seconds += took / SCALES[scale].jobs
    minutes = claim.get("minutes", 0) + seconds / 60
    return f"{minutes / 60:.1f} h" if minutes > 90 else f"{minutes:.0f} min"


if __name__ == "__main__":
    main()
