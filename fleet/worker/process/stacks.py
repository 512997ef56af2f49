"""Stacks of all threads of this process as text, to see why a worker is slow or stuck. Knows no
task.
"""

import logging
import sys
import threading
import traceback

MAX_FRAMES = 25
"""Number of frames that are logged per thread, the innermost ones."""


def stacks() -> str:
    """Return every thread's stack as text. A stack that several threads share (idle threads of a
    pool) comes first and once. The main thread, which runs the engine loop, comes last, since a
    line too long for the log loses its beginning.
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
    """Log a warning with reason `why` and every thread's stack (logging's `stack_info` has only the
    caller's).
    """
    file, line, function, _ = log.findCaller(stacklevel=2)
    log.handle(
        log.makeRecord(
            log.name, logging.WARNING, file, line, why, (), None, func=function, sinfo=stacks()
        )
    )
