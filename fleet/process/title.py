"""Change of the command line that `ps` and `/proc/PID/cmdline` show for this process. Linux
only.
"""

import ctypes
from pathlib import Path

RESERVE = " " * 1024
"""Last argument of a process that sets a longer title later: a title needs the memory of the
arguments.
"""


def set_process_title(title: str) -> None:
    """Show `title`, cut to the length of the original arguments, with a space between two
    arguments.

    The kernel shows the text up to its first zero if the last byte of the arguments is not zero
    (`get_mm_proctitle`).
    """
    # The second field, the name, may contain spaces and is in parentheses.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    room = end - start
    data = title.encode("utf-8", "surrogateescape")[: room - 2]
    ctypes.memmove(start, data + bytes(room - 1 - len(data)) + b".", room)
