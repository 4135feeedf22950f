"""What long work is at: a display on a terminal and in a notebook, plain log lines elsewhere."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

log = logging.getLogger("autop_ac")

Stage = Callable[[str], AbstractContextManager[None]]
"""``with stage("solve"):`` tells that this is what runs now."""


def silent(name: str) -> AbstractContextManager[None]:
    """Tells nothing."""
    return nullcontext()


def progress(verbose: bool = True, console: Console | None = None) -> Stage:
    """How stages are told, on the first process alone.

    On a terminal and in a notebook (with ipywidgets) each stage is a line with a running clock, on standard
    error; elsewhere, and on a terminal that cannot move its cursor, a line of the logger "autop_ac" at
    level INFO when it has ended.

    Args:
        verbose: False tells nothing.
        console: where the display goes; None for standard error.
    """
    if not verbose:
        return silent

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        if dist.is_initialized() and dist.get_rank() != 0:
            yield
            return
        shown = console or Console(stderr=True)
        if _can_display(shown):
            yield from _displayed(name, shown)
            return
        started = time.monotonic()
        yield
        log.info("%s: %.2f s", name, time.monotonic() - started)

    return stage


def _can_display(console: Console) -> bool:
    if console.is_jupyter:  # rich displays there by widgets, and warns where they are missing
        return importlib.util.find_spec("ipywidgets") is not None
    return console.is_terminal and not console.is_dumb_terminal


def _displayed(name: str, console: Console) -> Iterator[None]:
    columns = (
        SpinnerColumn("line", finished_text="+"),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    # what others print meanwhile goes above the line, not through it
    with Progress(*columns, console=console) as shown:
        task = shown.add_task(name, total=1)
        yield
        shown.update(task, completed=1)
