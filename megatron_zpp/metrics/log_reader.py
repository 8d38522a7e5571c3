"""Read back the log of a run, which metrics/lines.py formats."""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

BETWEEN, WITHIN = "sent between nodes per step (MB)", "sent within nodes per step (MB)"
BETWEEN_ISLANDS = "sent between islands per step (MB)"
VALIDATION = re.compile(r"validation loss at iteration \d+ on validation set \| lm loss value: (\S+)")
MODEL = re.compile(r"^\w+ with ([\d,]+) parameters, ZeRO stage")


@dataclass
class RunLog:
    """One run's log. ``lines``: numbers of each training line by name, without "lm loss" if all steps were skipped."""

    lines: list[dict[str, float]] = field(default_factory=list)
    validation_loss: float = math.nan  # after training
    num_parameters: int = 0

    def mean(self, name: str) -> float:
        """Average a field over the run's steps."""
        steps = np.diff([0.0, *(line["iteration"] for line in self.lines)])
        return float(np.average([line[name] for line in self.lines], weights=steps))

    def tokens_per_second(self) -> float:
        """Average the rate over the time of all lines but the first, which includes warming up."""
        lines = self.lines[1:] or self.lines
        steps = np.diff([line["iteration"] for line in self.lines]) if len(self.lines) > 1 else np.ones(1)
        seconds = np.array([line["elapsed time per iteration (ms)"] for line in lines]) / 1000 * steps
        return float(np.average([line["tokens per second"] for line in lines], weights=seconds))


def parse_line(line: str) -> dict[str, float] | None:
    """Return the numbers of a training line by name; None for other lines."""
    start = re.search(r"iteration +(\d+)/ *(\d+) \|", line)
    if start is None:
        return None
    fields = {"iteration": float(start[1]), "train iterations": float(start[2])}
    for name, value in re.findall(r"([^|:]+): +([-+.\deE]+|nan|inf) \|", line[start.end() - 1 :]):
        fields[name.strip(" |")] = float(value)
    return fields


def shorten(text: str) -> str | None:
    """Shorten a training line to about 120 characters, for a terminal; return None for other lines."""
    line = parse_line(text)
    if line is None:
        return None
    eta, skipped = re.search(r"ETA: (\S+)", text), line.get("number of skipped iterations", 0)
    fields = [
        f"  step {line['iteration']:5.0f}/{line['train iterations']:.0f}",
        f"loss {line.get('lm loss', math.nan):.3f}",
        f"lr {line['learning rate']:.2e}",
        f"norm {line['grad norm']:.3f}" if "grad norm" in line else None,
        f"{line['tokens per second']:8,.0f} tokens/s",
        _sent(line),
        f"{skipped:.0f} steps skipped" if skipped else None,
        f"{eta[1] if eta else ''} left",
    ]
    return "   ".join(field for field in fields if field is not None)


def _sent(line: dict[str, float]) -> str | None:
    """Format the bytes between nodes, or within the node where nothing crosses nodes; None where nothing is sent."""
    hop, where = (BETWEEN, "between nodes") if line.get(BETWEEN) else (WITHIN, "within the node")
    return f"{line[hop]:7.2f} MB {where} per step" if line.get(hop) else None


def read_log(path: Path) -> RunLog:
    """Parse the log of a finished run. Raises ValueError for others."""
    run = parse_log(path.read_text(encoding="utf-8", errors="replace"))
    if not run.lines or math.isnan(run.validation_loss):
        raise ValueError(f"{path} has no training lines, or no validation loss at its end: did the run finish?")
    return run


def parse_log(log: str) -> RunLog:
    """Parse the text of a log, complete or not. Where a resumed run repeats iterations, the later lines count."""
    run = RunLog()
    for text in log.splitlines():
        line, validation, model = parse_line(text), VALIDATION.search(text), MODEL.search(text)
        if line is not None:
            while run.lines and run.lines[-1]["iteration"] >= line["iteration"]:
                run.lines.pop()
            run.lines.append(line)
        if validation is not None:
            run.validation_loss = float(validation[1])
        if model is not None:
            run.num_parameters = int(model[1].replace(",", ""))
    return run
