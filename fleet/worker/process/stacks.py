"""Stacks of all threads of this process as text, to see why a worker is slow or stuck. Knows no
task.
"""

import logging
import sys
import threading
import traceback

MAX_FRAMES = 25
"""Logged of each thread: the innermost ones."""


def stacks() -> str:
    """Format every thread's stack: stacks that many threads share (idle ones of a pool) first and
    once, the main thread's, which runs the engine loop, last, since a line too long for the log
    loses its beginning.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    of_stack: dict[str, list[int]] = {}
    for ident, frame in sys._current_frames().items():  # pyright: ignore[reportPrivateUsage]
        of_stack.setdefault(
            "".join(traceback.format_stack(frame)[-MAX_FRAMES:]).rstrip(), []
        ).append(ident)
    ordered = sorted(of_stack.items(), key=lambda item: (main in item[1], -len(item[1])))
    return "\n".join(
        f"Thread {', '.join(str(names.get(ident, ident)) for ident in idents)}:\n{stack}"
        for stack, idents in ordered
    )


def log_stacks(log: logging.Logger, why: str) -> None:
    """Log a warning with every thread's stack, not only the caller's as `stack_info` does."""
    file, line, function, _ = log.findCaller(stacklevel=2)
    log.handle(
        log.makeRecord(
            log.name, logging.WARNING, file, line, why, (), None, func=function, sinfo=stacks()
        )
    )
