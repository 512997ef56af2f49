"""Progress on the terminal while chaos runs; on stderr, so that the verdict alone goes to stdout. Measures nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Meter:
    """Lines that stay, and bars below them for what is under way. Where nobody watches, lines only."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def say(self, line: str) -> None:
        self._progress.console.print(f"fleet chaos: {line}", highlight=False, soft_wrap=True, markup=False)

    def steps(self, what: str, total: int | None) -> Callable[[], None]:
        """Begin a bar; what is returned is called after each step, from any thread. `total` None: nobody knows how many."""
        if not self._progress.console.is_terminal:
            self.say(what if total is None else f"{what} ({total})")
        task = self._progress.add_task(what, total=total)
        return lambda: self._progress.advance(task)


@contextmanager
def meter() -> Iterator[Meter]:
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # The display redraws in a thread of its own: seldom, for it shares the cores with what it shows.
    with Progress(*columns, console=console, refresh_per_second=2, disable=not console.is_terminal) as progress:
        yield Meter(progress)
