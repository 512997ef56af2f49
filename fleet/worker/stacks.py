"""Where each thread of this process is, as text, for people who ask what a worker does, or why it does nothing. Knows no task."""

import logging
import sys
import threading
import traceback

MAX_FRAMES = 25
"""Of a thread, the innermost."""


def stacks() -> str:
    """The main thread, which is the engine loop's, comes last: what is too long for the log loses its beginning."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] == main)  # pyright: ignore[reportPrivateUsage]
    return "\n".join(
        f"Thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame)[-MAX_FRAMES:]).rstrip()
        for ident, frame in frames
    )


def log_stacks(log: logging.Logger, why: str) -> None:
    """A warning that bears every thread's stack, and not only its own as `stack_info` would."""
    file, line, function, _ = log.findCaller(stacklevel=2)
    log.handle(log.makeRecord(log.name, logging.WARNING, file, line, why, (), None, func=function, sinfo=stacks()))
