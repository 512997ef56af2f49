"""Replacement of the command line that `ps` and `/proc/PID/cmdline` show for this process. Linux
only.
"""

import ctypes
from pathlib import Path

RESERVE = " " * 1024
"""Last command-line argument of a process that sets a longer title later: a title can only use the
memory of the original arguments.
"""


def set_process_title(title: str) -> None:
    """Show `title` as the command line of this process, cut to the length of the original
    arguments. Arguments in `title` are separated by spaces.

    The kernel shows the text up to its first zero byte if the last byte of the arguments' memory is
    not zero (`get_mm_proctitle`).
    """
    # The second field, the name, may contain spaces and is in parentheses.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    room = end - start
    data = title.encode("utf-8", "surrogateescape")[: room - 2]
    ctypes.memmove(start, data + bytes(room - 1 - len(data)) + b".", room)
