"""Progress of long measurements, on stderr, so that stdout holds only the report."""

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
    """Progress bars on a terminal; elsewhere a line for each bar that begins."""

    def __init__(self, progress: Progress, command: str) -> None:
        self._progress, self._command = progress, command

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self._progress.console.print(
            f"{self._command}: {line}", highlight=False, soft_wrap=True, markup=False
        )

    def counted(self, label: str, total: int | None) -> Callable[[int], None]:
        """Begin a bar, of an unknown length if `total` is None; the returned function advances it,
        from any thread.
        """
        if not self._progress.console.is_terminal:
            self.say(label if total is None else f"{label} ({total})")
        task = self._progress.add_task(label, total=total)
        return lambda count: self._progress.advance(task, count)

    def steps(self, label: str, total: int | None) -> Callable[[], None]:
        """Begin a bar; the returned function advances it by one step."""
        advance = self.counted(label, total)
        return lambda: advance(1)


@contextmanager
def meter(command: str) -> Iterator[Meter]:
    """Show the progress of a command, such as `fleet bench`, until the end of the block."""
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
    """Show a single bar until the end of the block."""
    with meter(command) as progress:
        yield progress.steps(label, total)
