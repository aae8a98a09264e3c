"""What is being done, how far it is and how long it will take: on standard error, or nothing.

A bar on a terminal; elsewhere a plain line at once and further ones as time passes; in a notebook
one line that changes, and says in the end how long it took.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from types import TracebackType
from typing import Any, Protocol

from foldwise.support.words import duration

# Seconds between lines of a log, and before a new stage is worth a line of its own.
PERIOD, SOON = 10.0, 1.0


class Display(Protocol):
    """Where progress is shown."""

    def start(self, description: str, total: int | None) -> None:
        """A new stage; without a total nobody knows how long it is."""

    def advance(self, amount: int) -> None:
        """So much more of the stage is done."""

    def stop(self) -> None:
        """The work has ended."""


class Progress:
    """What is being done, how far it is and how long it will take; nothing unless ``show``.

    ``work`` is the whole in a few words, shown at once and until the first stage begins.
    """

    def __init__(self, show: bool, work: str = "starting"):
        self.show, self.work = show, work
        self._display: Display | None = None

    def __enter__(self) -> Progress:
        if self.show:
            self._display = _display(self.work)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._display is not None:
            self._display.stop()
            self._display = None

    def start(self, description: str, total: int | None = None) -> None:
        """Begin a new stage; without a total nobody knows how long it is."""
        if self._display is not None:
            self._display.start(description, total)

    def advance(self, amount: int) -> None:
        """Say that ``amount`` more of the stage is done."""
        if self._display is not None:
            self._display.advance(amount)


def _display(work: str) -> Display:
    if _in_notebook():
        return Cell(work)
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        return Bar(work)
    return Lines(work)


def _in_notebook() -> bool:
    found = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return found is not None and type(found()).__name__ == "ZMQInteractiveShell"


# ---------------------------------------------------------------- terminals


# Width of a bar; columns that it, per cent, two times and "left" take with their spaces.
BAR_WIDTH = 20
_BESIDE = BAR_WIDTH + 4 + 7 + 4 + 7 + 5


class Bar:
    """Bars of rich; stages without a total pulse. Those that took a while stay when they end.

    A description is cut where the bar and the times would have no room.
    """

    def __init__(self, work: str) -> None:
        from rich import progress
        from rich.console import Console

        console = Console(stderr=True)
        self._room = max(console.width - _BESIDE, 12)
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=BAR_WIDTH),
            progress.TaskProgressColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.fields[left]}"),
            progress.TimeRemainingColumn(),
            console=console,
        )
        self._task: Any = None
        self._bar.start()
        self.start(work, None)

    def start(self, description: str, total: int | None) -> None:
        """A new bar."""
        self._finish()
        short = (
            description if len(description) <= self._room else f"{description[: self._room - 1]}…"
        )
        self._task = self._bar.add_task(short, total=total, left="left" if total else "")

    def advance(self, amount: int) -> None:
        """A longer bar."""
        self._bar.update(self._task, advance=amount)

    def stop(self) -> None:
        """No more bars."""
        self._finish()
        self._bar.stop()

    def _finish(self) -> None:
        if self._task is None:
            return
        task = self._bar.tasks[self._bar.task_ids.index(self._task)]
        if task.total is None or (task.elapsed or 0.0) < SOON:
            self._bar.remove_task(self._task)
        self._task = None


# ---------------------------------------------------------------- stages with their times


class Stage:
    """What is being done, since when, and how far it is, as a line of text."""

    def __init__(self, description: str, total: int | None):
        self.description, self.total, self.done = description, total, 0
        self.began = time.monotonic()

    def __str__(self) -> str:
        if not self.total or not self.done:
            return self.description
        share = min(self.done / self.total, 1.0)
        left = (time.monotonic() - self.began) * (1.0 - share) / share
        text = f"{self.description}: {100 * share:.0f} %"
        return text if share == 1.0 else f"{text}, about {duration(left)} left"


class Lines:
    """Plain lines for logs: at once, when a new stage begins, and every ten seconds."""

    def __init__(self, work: str, period: float = PERIOD):
        self._period, self._began, self._said = period, time.monotonic(), 0.0
        self._stage = Stage(work, None)
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._say()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def start(self, description: str, total: int | None) -> None:
        """A line, unless the last is very recent or says the same."""
        with self._lock:
            known = self._stage.description == description
            self._stage = Stage(description, total)
            if time.monotonic() - self._said >= SOON and not known:
                self._say()

    def advance(self, amount: int) -> None:
        """Counted; lines come by time."""
        self._stage.done += amount

    def stop(self) -> None:
        """No more lines."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(self._period / 5):
            with self._lock:
                if time.monotonic() - self._said >= self._period:
                    self._say()

    def _say(self) -> None:
        self._said = time.monotonic()
        since = f"{self._said - self._began:.0f} s"
        print(f"foldwise: {since:>5}  {self._stage}", file=sys.stderr, flush=True)


class Cell:
    """One line below a cell of a notebook, which changes; what is left says how long it took."""

    def __init__(self, work: str) -> None:
        from IPython.display import display  # a notebook is there, so IPython is

        self._began = self._shown = time.monotonic()
        self._work, self._stage = work, Stage(work, None)
        self._handle = display(Line(f"foldwise: {work}"), display_id=True)

    def start(self, description: str, total: int | None) -> None:
        """Another text."""
        self._stage = Stage(description, total)
        self._show(f"foldwise: {self._stage}")

    def advance(self, amount: int) -> None:
        """Another text, twice a second at most."""
        self._stage.done += amount
        if time.monotonic() - self._shown > 0.5:
            self._show(f"foldwise: {self._stage}")

    def stop(self) -> None:
        """How long it took."""
        self._show(f"foldwise: {self._work}: {duration(time.monotonic() - self._began)}")

    def _show(self, text: str) -> None:
        self._shown = time.monotonic()
        self._handle.update(Line(text))


class Line:
    """A text that a notebook shows without quotation marks."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text
