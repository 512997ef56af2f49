"""Progress of a download: a bar on a terminal, lines elsewhere."""

import sys
import time
from typing import TYPE_CHECKING, NoReturn

from tqdm import tqdm

if TYPE_CHECKING:
    Base = tqdm[NoReturn]
else:
    Base = tqdm
LINE_EVERY_S = 10.0
"""Seconds between two lines where there is no terminal."""


def shown_bytes(size: float) -> str:
    return f"{tqdm.format_sizeof(size)}B"


class DownloadProgress(Base):
    """Bytes received, their rate and the remaining time."""

    def __init__(self, description: str, size: int) -> None:
        self._on_terminal = sys.stdout.isatty()
        self._description = f"fleet: {description}"
        self._waited_s: float | None = None
        gauge = "|{bar}| " if self._on_terminal else ""
        super().__init__(
            desc=self._description,
            total=size,
            unit="B",
            unit_scale=True,
            file=sys.stdout,
            mininterval=0.1 if self._on_terminal else LINE_EVERY_S,
            bar_format="{desc}: {percentage:3.0f}% "
            + gauge
            + "{n_fmt} of {total_fmt}, {rate_fmt}, {remaining} left",
        )

    def add_present(self, size: int) -> None:
        """Count bytes that this process did not receive now, without an effect on the rate. A
        negative size takes bytes back.
        """
        self.n += size
        self.initial += size
        self.last_print_n += size

    def wait(self, size: int) -> None:
        """Count `size` bytes that another process has received since the last call, and show that
        this process waits.
        """
        self.add_present(size)
        now_s = time.monotonic()
        is_due = self._waited_s is None or now_s - self._waited_s >= LINE_EVERY_S
        if self._on_terminal or is_due:
            self._waited_s = now_s
            self.set_description_str(f"{self._description}, another process downloads it")

    def end_wait(self) -> None:
        if self._waited_s is not None:
            self._waited_s = None
            self.set_description_str(self._description, refresh=False)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if self._on_terminal:
            super().display(msg, pos)
        else:
            print(self, flush=True)

    def close(self) -> None:
        if not self._on_terminal and not self.disable:
            self.display()
            self.disable = True  # what follows would print an empty line
        super().close()
