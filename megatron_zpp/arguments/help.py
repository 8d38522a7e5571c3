"""The trainer's --help: the flags that most runs need, one group of flags, or all."""

import argparse
import difflib
from collections.abc import Sequence

from megatron_zpp.families import ARCHITECTURES, Architecture
from megatron_zpp.settings.checks import require
from megatron_zpp.settings.flags import group_title, iterate_flags
from megatron_zpp.settings.groups import all_flags, iterate_groups

# The groups of --help, which shows flags by ``Flag.first``.
FIRST = ("The model", "Data", "Training", "Memory and links", "Checkpoints and logs")
EXAMPLES = """\
examples:
  {program} --preset {preset} --data-path data/text --tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR \\
      --micro-batch-size 4 --global-batch-size 64 --train-iters 10000 --lr 3e-4 --bf16 --save DIR --save-interval 500
  add for slow links between nodes:
      --zeropp auto
  {program} FLAGS --dry-run   what FLAGS would do, in memory and traffic

--help GROUP lists a group of flags, --help-all lists all. Groups: {groups}.
"""


def help_text(architecture: Architecture, words: Sequence[str] = ("--help",)) -> str:
    """Return what ``--help``, ``--help GROUP`` or ``--help-all`` prints. Raises SettingsError for an unknown group."""
    # A trainer from outside this package is no command of ours.
    trainer = f"-m megatron_zpp pretrain-{architecture.name}" if architecture in ARCHITECTURES else "%(prog)s"
    groups = dict(iterate_groups())
    is_short = "--help-all" not in words and (len(words) == 1 or words[1].startswith("-"))
    preset = min(architecture.presets, default="NAME")
    examples = EXAMPLES.format(program="%(prog)s", preset=preset, groups=", ".join(groups))
    parser = argparse.ArgumentParser(
        usage=f"%(prog)s [flags]\n       torchrun --nproc-per-node N {trainer} [flags]   for N ranks",
        description=f"Pretrain a {architecture.title} model with ZeRO++ on PyTorch FSDP2.",
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=36),
        epilog=examples if is_short else None,
        add_help=False,
    )
    shown = {group_title(group): list(iterate_flags(group)) for group in groups.values()}
    if is_short:
        shown = {title: [flag for flag in all_flags().values() if flag.first == title] for title in FIRST}
    elif "--help-all" not in words:
        nearest = difflib.get_close_matches(words[1], groups, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"groups are {', '.join(groups)}"
        require(words[1] in groups, f"--help {words[1]} is no group of flags; {hint}")
        title = group_title(groups[words[1]])
        shown = {title: shown[title]}
    for title, section_flags in shown.items():
        section = parser.add_argument_group(title)
        for flag in section_flags:
            flag.add_to(section)
    return parser.format_help()
