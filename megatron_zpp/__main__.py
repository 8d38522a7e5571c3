"""``megatron-zpp COMMAND``, or ``python -m megatron_zpp COMMAND``: all programs of the package under one name."""

import difflib
import functools
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path


def architecture_names() -> list[str]:
    """Find the names of the records in families/. Reads the files: importing them would import torch before --help."""
    files = sorted((Path(__file__).parent / "families").rglob("*.py"))
    record = re.compile(r'^\w+ = (?:Architecture|decoder)\(\s*name="([\w-]+)"', re.MULTILINE)
    return [name for file in files for name in record.findall(file.read_text(encoding="utf-8"))]


TOOLS = {  # each a file below commands/
    "preprocess-data": "tokenize text into a dataset",
    "train-tokenizer": "train a SentencePiece tokenizer",
    "merge-datasets": "join datasets of one tokenizer into one",
    "inspect-dataset": "show what is in a dataset, and in which order a run reads it",
    "inspect-checkpoint": "list, verify and compare checkpoints",
    "generate-text": "sample text from a checkpoint",
    "chat": "chat with a checkpoint's model in a terminal",
    "evaluate": "evaluate a checkpoint on tasks of lm-evaluation-harness",
    "export-hf": "write a checkpoint as a model of Hugging Face transformers",
    "export-peft": "write a checkpoint's adapters as a folder of PEFT",
    "import-hf": "make a checkpoint out of a model of Hugging Face transformers",
    "export-megatron": "write a checkpoint for Megatron-LM",
    "import-megatron": "make a checkpoint out of one of Megatron-LM or Megatron-DeepSpeed",
    "estimate": "count memory, traffic and time of a training run before it starts",
    "plan": "rank layouts and settings by predicted speed; --measure a cluster, --try them on this machine",
    "report": "compare training runs on one page",
    "why-hung": "say which collective a job hung in, and which ranks it waited for",
    "doctor": "say what a node lacks, before a run; under torchrun, of all nodes and their links",
    "env": "print versions, devices, network and kernels, for a bug report",
}
ALIASES = {"measure-cluster": ["plan", "--measure"], "suggest-settings": ["plan", "--try"]}  # earlier names
COMMANDS = {
    f"pretrain-{name}": f"train a {name} model, on one rank or under torchrun" for name in architecture_names()
} | TOOLS
TRAIN_EXTRA = ("numpy", "rich", "sentencepiece")


def main() -> int:
    """Run the command that ``sys.argv`` names. Return its status: 2 if it is unknown or a package is missing."""
    launcher, *argv = sys.argv
    program = "python -m megatron_zpp" if Path(launcher).name == "__main__.py" else "megatron-zpp"
    if not argv or argv[0] in ("-h", "--help"):
        print(help_text(program), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    command, *rest = [*ALIASES.get(argv[0], argv[:1]), *argv[1:]]
    if command not in COMMANDS:
        nearest = difflib.get_close_matches(command.replace("_", "-"), COMMANDS, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"{program} --help lists all"
        print(f"error: unknown command {command}; {hint}", file=sys.stderr)
        return 2
    try:
        run = find_program(command)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in TRAIN_EXTRA:
            raise
        print(
            f"error: {program} {command} needs the package {package}: pip install {' '.join(TRAIN_EXTRA)}, "
            "or megatron_zpp's extra train",
            file=sys.stderr,
        )
        return 2
    sys.argv = [f"{program} {command}", *rest]  # argparse's usage lines begin with it
    return run() or 0


def help_text(program: str) -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {summary}" for name, summary in COMMANDS.items())
    return (
        f"usage: {program} COMMAND [flags]   ({program} COMMAND --help lists a command's flags)\n\n"
        f"Pretraining with ZeRO++ and LoCo. Commands:\n{commands}\n\n"
        "On N ranks: torchrun --nproc-per-node N -m megatron_zpp pretrain-gpt [flags]"
    )


def find_program(command: str) -> Callable[[], int | None]:
    """Import the function that runs one of ``COMMANDS``, and torch with it."""
    if command.startswith("pretrain-"):
        from megatron_zpp.commands.pretrain import main as pretrain
        from megatron_zpp.families import find_architecture

        return functools.partial(pretrain, find_architecture(command.removeprefix("pretrain-")))
    file = next((Path(__file__).parent / "commands").rglob(f"{command.replace('-', '_')}.py"))
    return importlib.import_module(".".join(file.relative_to(Path(__file__).parents[1]).with_suffix("").parts)).main


if __name__ == "__main__":
    sys.exit(main())
