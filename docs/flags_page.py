"""Write the page of flags from the settings: ``python docs/flags_page.py docs/reference/flags.md``."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_zpp.arguments.deepspeed_keys import TOP, Row, keys_of
from megatron_zpp.arguments.foreign_flags import EXPERT_FLAGS, EXPERTS, NOT_NEEDED, REFUSED, TRANSLATED
from megatron_zpp.families import ARCHITECTURES
from megatron_zpp.fields import Bounds
from megatron_zpp.settings.checks import flag_of
from megatron_zpp.settings.flags import Flag, group_title, iterate_flags
from megatron_zpp.settings.groups import iterate_groups

_INTRODUCTION = """\
# Flags

All flags of PROGRAMS. This page is generated; after a change of the settings, run
`python docs/flags_page.py docs/reference/flags.md`.

A value comes from the flag, else from the last file of `--config` with it, else from the DeepSpeed file of
`--deepspeed_config`, else from `--preset`, else from the default below. A file that contradicts a flag is refused.
Flags that are not on this page are refused too, with the nearest name. One start reports all mistakes, each in a line
of its own, and ends with status 2. In tables, `-` means that nothing is set; whole numbers are at most 2147483647
unless a flag has its own limit, and no number may be NaN or infinite.

Flags without a mark are stable: the promise begins with release 0.1, and keeps their names and meanings. One that is
renamed works under its former name for at least two minor versions, and the changelog says when that ends. *Advanced*
flags tune what works without them: their defaults may change, with a note in the changelog. *Experimental* flags may
change or go with any version. `--help` shows the flags that most runs need, `--help GROUP` a section of this page,
`--help-all` all of it.
"""


def render_reference() -> str:
    """Render the page as Markdown."""
    programs = " and ".join(f"`{architecture.script}`" for architecture in ARCHITECTURES)
    parts = [_INTRODUCTION.replace("PROGRAMS", programs)]
    parts.append("## Changes\n\n" + "".join(f"- {line}\n" for line in _changes()))
    for _, group in iterate_groups():
        rows = [(f"`{flag.name}`", _default(flag), _meaning(flag)) for flag in iterate_flags(group)]
        parts += [f"## {group_title(group)}\n", table(("flag", "default", "meaning"), rows)]
    parts.append("## Flags of Megatron-LM and Megatron-DeepSpeed that need no setting\n")
    names = ", ".join(f"`{flag}`" for flag in (*EXPERT_FLAGS, "--moe-..."))
    parts.append(
        "They are accepted, with one note: what they ask for is so anyway, or changes neither the model nor its "
        f"training. So are {names} without `{EXPERTS}`, or with 1 of them; with more, those that no table here lists "
        "are refused.\n"
    )
    accepted = [
        (f"`{name}`" + (f" {' or '.join(foreign.accepted)}" if foreign.accepted else ""), foreign.because)
        for name, foreign in NOT_NEEDED.items()
    ]
    translated = []
    for name, meaning in TRANSLATED.items():
        if isinstance(meaning, dict):
            translated += [(f"`{name} {value}`", f"`{written}`") for value, written in meaning.items()]
        else:
            translated.append((f"`{name}{' X' if '{' in meaning else ''}`", f"`{meaning.format('X')}`"))
    refused = [(f"`{name}`", instead) for name, instead in REFUSED.items()]
    parts += [
        table(("flag", "because"), accepted),
        "## Flags of Megatron-LM and Megatron-DeepSpeed that have another name here\n",
        table(("flag", "is"), translated),
        "## Flags of Megatron-LM and Megatron-DeepSpeed that are refused\n",
        table(("flag", "what to do"), refused),
        "## Keys of the DeepSpeed file\n",
        "The file sets what it names and nothing else; `null` and `auto` leave a setting to the flags.\n",
        table(("key", "effect"), list(_keys(TOP, ""))),
    ]
    return "\n".join(parts)


def flag_changes() -> Iterator[tuple[str, str, list[str]]]:
    """Yield version, "+" or "-", and the flags of each line of ``reference/flag_changes.txt``."""
    version = ""
    for line in (Path(__file__).parent / "reference/flag_changes.txt").read_text(encoding="utf-8").splitlines():
        sign, *names = line.split() or ["#"]
        if sign in "+-":
            yield version, sign, names
        elif sign != "#":
            version = sign


def _changes() -> Iterator[str]:
    """Say what came and went in each version; of the first one only how many."""
    first, count = None, 0
    for version, sign, names in flag_changes():
        first = first or version
        if version == first:
            count += len(names)
        else:
            yield f"{version}: {'with' if sign == '+' else 'without'} {', '.join(f'`{name}`' for name in names)}"
    yield f"{first}: the first {count} flags, as `flag_changes.txt` lists them"


def _default(flag: Flag) -> str:
    text = "-" if flag.default is None else "off" if flag.default is False else f"{flag.default}"
    return f"`{text}`" if "<" in text else text  # or Markdown takes it for HTML


def _meaning(flag: Flag) -> str:
    marks = [] if flag.tier == "stable" else [f"*{flag.tier.capitalize()}.*"]
    marks += [f"`{alias}` works, too." for alias in flag.aliases]
    return " ".join([describe(flag.help, flag.choices, flag.bounds), *marks])


def describe(help: str, choices: Sequence[str] | None, bounds: Bounds) -> str:
    """Return a help text as Markdown, with the values that are allowed."""
    allowed = f"one of {', '.join(choices)}" if choices else str(bounds)
    return help.replace("*", r"\*") + (f" ({allowed})" if allowed else "")


def _keys(section: Row, prefix: str) -> Iterator[tuple[str, str]]:
    for name, key in keys_of(section).items():
        path = f"{prefix}{name}"
        match key:
            case {"sets": settings}:
                yield f"`{path}`", f"sets {_flags(*settings.split())}"
            case {"only": values, "otherwise": otherwise}:
                # As in JSON, but for quotes.
                allowed = [str(value).lower() if isinstance(value, bool) else str(value) for value in values]
                yield f"`{path}`", f"only {' or '.join(allowed)}: {otherwise}"
            case {"off": otherwise}:
                yield f"`{path}`", f"must be off: {otherwise}"
            case {"not_needed": because}:
                yield f"`{path}`", f"not needed: {because}"
            case {"@by_type": setting, **types}:
                for kind, params in types.items():
                    needs = ", ".join(params["@required"])
                    yield f"`{path}.type` {kind}", f"sets {_flags(setting)}; needs {needs}"
                    yield from _keys({"params": params}, f"{path}.")
            case _:
                yield from _keys(key, f"{path}.")


# Meanings of settings of DeepSpeed keys that are no flags.
_NO_FLAG = {
    "accumulation_steps": "micro-batches per optimizer step, and so a batch size that is not given",
    "warmup_min_ratio": "`--lr-warmup-init` as a part of the learning rate",
    "cos_min_ratio": "`--min-lr` as a part of the learning rate",
    "cycle_second_step_size": "`--lr-decay-iters`, together with cycle_first_step_size",
    "output_path": "`--tensorboard-dir`, together with job_name",
    "job_name": "the last part of `--tensorboard-dir`",
}


def _flags(*settings: str) -> str:
    return ", ".join(_NO_FLAG.get(setting) or f"`{flag_of(setting)}`" for setting in settings)


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render_reference(), encoding="utf-8")
