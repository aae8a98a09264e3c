"""A progress bar with the time left, or nothing."""

from types import TracebackType
from typing import Any


class Progress:
    """One line that says what is being done, how far it is and how long it will take."""

    def __init__(self, show: bool):
        self.show = show
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> "Progress":
        if self.show:
            from rich import progress

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(bar_width=24),
                progress.TaskProgressColumn(),
                progress.TimeElapsedColumn(),
                progress.TextColumn("left"),
                progress.TimeRemainingColumn(),
                progress.TextColumn("{task.fields[note]}"),
            )
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._finish()
            self._bar.stop()

    def start(self, description: str, total: int | None = None) -> None:
        """Begin a new stage; without a total the bar only pulses."""
        if self._bar is not None:
            self._finish()
            self._task = self._bar.add_task(description, total=total, note="")

    def advance(self, amount: int, note: str = "") -> None:
        """Say that ``amount`` more of the stage is done."""
        if self._bar is not None:
            self._bar.update(self._task, advance=amount, note=note)

    def _finish(self) -> None:
        """Keep finished stages with a total on the screen, drop those that only pulsed."""
        if self._task is None:
            return
        task = self._bar.tasks[self._bar.task_ids.index(self._task)]
        if task.total is None:
            self._bar.remove_task(self._task)
        self._task = None
