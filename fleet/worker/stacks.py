"""Where each thread of this process is, as text, for people who ask what a worker does, or why it does nothing. Knows no task."""

import logging
import sys
import threading
import traceback

MAX_FRAMES = 25
"""Of a thread, the innermost."""


def stacks() -> str:
    """The main thread, which is the engine loop's, comes last, and those that many share, such as idle ones of a pool, first and
    once: what is too long for the log loses its beginning.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    of_stack: dict[str, list[int]] = {}
    for ident, frame in sys._current_frames().items():  # pyright: ignore[reportPrivateUsage]
        of_stack.setdefault("".join(traceback.format_stack(frame)[-MAX_FRAMES:]).rstrip(), []).append(ident)
    told = sorted(of_stack.items(), key=lambda item: (main in item[1], -len(item[1])))
    return "\n".join(f"Thread {', '.join(str(names.get(ident, ident)) for ident in idents)}:\n{stack}" for stack, idents in told)


def log_stacks(log: logging.Logger, why: str) -> None:
    """A warning that bears every thread's stack, and not only its own as `stack_info` would."""
    file, line, function, _ = log.findCaller(stacklevel=2)
    log.handle(log.makeRecord(log.name, logging.WARNING, file, line, why, (), None, func=function, sinfo=stacks()))
