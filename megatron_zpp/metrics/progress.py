"""Progress bars on a terminal, and lines of progress in a log."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def progress(
    description: str, total: int | None = None, *, any_rank: bool = False, line_every: float | None = None
) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr around a long step, or a spinner without ``total``; yield ``advance(count)``.

    A bar ends at its total, which may be an estimate. Only rank 0 shows it, or any rank with ``any_rank``. Without a
    terminal ``line_every`` seconds print a line.
    """
    shown = any_rank or os.environ.get("RANK", "0") == "0"
    if not shown or not sys.stderr.isatty():
        if shown and total is not None and line_every is not None:
            yield _line_printer(description, total, line_every)
        else:
            yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns: list[Any] = [SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()]
    if total is not None:
        columns[2:2] = [BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)

        def advance(count: int) -> None:
            done = bar.tasks[0].completed + count
            bar.update(task, completed=done if total is None else min(done, total))

        yield advance
        bar.update(task, completed=total)


def _line_printer(description: str, total: int, every: float) -> Callable[[int], None]:
    start = last = time.monotonic()
    done = 0

    def advance(count: int) -> None:
        nonlocal done, last
        done += count
        now = time.monotonic()
        if now - last >= every and done < total:
            last, left = now, (now - start) * (total - done) / max(done, 1)
            print(f"{description}: {100 * done / total:.0f} %, about {left:.0f} s left", file=sys.stderr, flush=True)

    return advance
