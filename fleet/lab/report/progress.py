"""Progress display of long measurements, on stderr, so that stdout holds only the report."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)


class Meter:
    """Display of progress bars on a terminal; elsewhere it prints a line for each bar that
    begins.
    """

    def __init__(self, progress: Progress, command: str) -> None:
        self._progress, self._command = progress, command

    def say(self, line: str) -> None:
        """Print a line that remains visible above the progress bars."""
        self._progress.console.print(
            f"{self._command}: {line}", highlight=False, soft_wrap=True, markup=False
        )

    def counted(self, label: str, total: int | None) -> Callable[[int], None]:
        """Begin a progress bar. `total`: length of the bar, None if unknown. The returned function
        advances it by a count, from any thread.
        """
        if not self._progress.console.is_terminal:
            self.say(label if total is None else f"{label} ({total})")
        task = self._progress.add_task(label, total=total)
        return lambda count: self._progress.advance(task, count)

    def steps(self, label: str, total: int | None) -> Callable[[], None]:
        """Begin a progress bar. The returned function advances it by one step."""
        advance = self.counted(label, total)
        return lambda: advance(1)


@contextmanager
def meter(command: str) -> Iterator[Meter]:
    """Show progress bars until the end of the block. `command`: prefix of printed lines, such as
    `fleet bench`.
    """
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    # The display redraws on a thread of its own: seldom, since it shares the cores with the
    # measurement.
    with Progress(
        *columns, console=console, refresh_per_second=2, disable=not console.is_terminal
    ) as progress:
        yield Meter(progress, command)


@contextmanager
def progress_bar(command: str, label: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a single progress bar until the end of the block; the yielded function advances it by
    one step.
    """
    with meter(command) as progress:
        yield progress.steps(label, total)
