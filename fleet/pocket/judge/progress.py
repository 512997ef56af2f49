"""How far the judging is, on stderr, so that the report alone goes to stdout."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar of `total` steps; what is given is called after each."""
    with tqdm(total=total, desc=what, mininterval=1) as bar:

        def advance() -> None:
            bar.update()

        yield advance
