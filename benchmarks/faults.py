"""A fault campaign: runs are killed, stopped, robbed of their files, and must end as if nothing had happened.

    sudo .venv/bin/python benchmarks/faults.py --seed 1 --output benchmarks/results/faults.jsonl

One small GPT is trained on 4 ranks on real text, with dropout, moved codes, LoCo, evaluations and a save at every step
or two, once undisturbed and then many times with faults that are drawn from the seed. After each fault the same command
is started again, and in the end all parameters and the optimizer must be those of the undisturbed run, bit for bit.
Each case is one line of the output:

    survived   went on by itself, or with the same command, and ended bit-identical
    reported   stopped with an error that names the cause, and changed nothing (damage, a folder in use, no room)
    lost, hung, wrong   what must not happen

The killed link runs real torchrun in the cluster in a box. Disk full, read-only folder and killed link need root, and
are left out with a note elsewhere.
"""

import os
import random
import tempfile
from pathlib import Path

import fault_damage
from common import new_parser
from fault_campaign import Campaign, Fault
from fault_runs import preload
from fault_signals import kills, kills_in_a_place, stops, stops_in_a_place

# How often each kind is tried, and what does it.
KINDS: dict[str, tuple[int, Fault]] = {
    "kill": (100, kills),
    "kill in a place": (80, kills_in_a_place),
    "stop": (20, stops),
    "stop in a place": (50, stops_in_a_place),
    "damaged checkpoint": (24, fault_damage.damaged_checkpoint),
    "special file": (12, fault_damage.special_file),
    "damaged data": (24, fault_damage.damaged_data),
    "damaged cache": (20, fault_damage.damaged_cache),
    "diverged": (8, fault_damage.diverged),
    "two jobs": (2, fault_damage.two_jobs),
    "disk full": (2, fault_damage.disk_full),
    "read-only": (2, fault_damage.read_only),
    "killed link": (2, fault_damage.killed_link),
}
NEED_ROOT = ("disk full", "read-only", "killed link")


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", metavar="KIND", help="these kinds of faults; default: all")
    parser.add_argument("--share", type=float, default=1.0, help="of the number of faults of each kind")
    parser.add_argument("--output", type=Path, help="append one JSON line for each case, and a summary")
    arguments = parser.parse_args()
    preload()
    with tempfile.TemporaryDirectory(prefix="faults") as folder:
        campaign = Campaign(Path(folder), random.Random(arguments.seed), arguments.seed, arguments.output)
        campaign.prepare()
        for kind, (number, disturb) in KINDS.items():
            if arguments.only is not None and kind not in arguments.only:
                continue
            if kind in NEED_ROOT and os.geteuid() != 0:
                print(f"left out without root: {kind}")
                continue
            campaign.repeat(kind, max(1, round(number * arguments.share)), disturb)
        campaign.summary()


if __name__ == "__main__":
    main()
