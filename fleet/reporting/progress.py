"""Progress on the terminal while something long is measured; on stderr, so that the report alone goes to stdout."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Meter:
    """One line at a time: what is measured now, and how much of it is done."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def counted(self, what: str, total: int) -> Callable[[int], None]:
        """Begin a line of `total` steps; what is returned is told how many more are done."""
        if not self._progress.console.is_terminal:
            self._progress.console.print(f"fleet bench: {what} ({total})", highlight=False, soft_wrap=True)
        task = self._progress.add_task(what, total=total)
        return lambda count: self._progress.advance(task, count)

    def steps(self, what: str, total: int) -> Callable[[], None]:
        """The same, one step at a time."""
        advance = self.counted(what, total)
        return lambda: advance(1)


@contextmanager
def meter() -> Iterator[Meter]:
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # The display redraws in a thread of its own: seldom, for it shares the cores with what it shows.
    with Progress(*columns, console=console, refresh_per_second=2, disable=not console.is_terminal) as progress:
        yield Meter(progress)
