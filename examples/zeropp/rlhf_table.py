"""Print the results of rlhf.sh side by side: one row a method, ZeRO-3 before ZeRO++."""

import json
import sys

from megatron_zpp.errors import reports_errors
from megatron_zpp.files import read_text


@reports_errors
def main() -> None:
    if len(sys.argv) != 2:
        raise ValueError("give the file of rlhf.sh's results: rlhf_table.py FILE")
    rows = [json.loads(line) for line in read_text(sys.argv[1]).splitlines()]
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    figures = ("tokens/s", "MB between nodes per step", "MB within nodes per step")
    print(f"{'':34}" + "".join(f"{setting:>26}" for setting in settings))
    for method in dict.fromkeys(row["method"] for row in rows):
        of_settings = {row["setting"]: row for row in rows if row["method"] == method}
        for figure in figures:
            values = [of_settings[setting][figure] if setting in of_settings else "" for setting in settings]
            print(f"{method + ', ' + figure:34}" + "".join(f"{value!s:>26}" for value in values))


if __name__ == "__main__":
    sys.exit(main())
