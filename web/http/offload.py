"""Threads for work on large inputs, which would stall all other connections in the event loop.
Knows no route.

Functions that run in these threads must not hold the interpreter lock for more than a few
milliseconds at a time, or the event loop would wait all the same. Time spent on a refused input is
charged to its sender.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, ParamSpec, TypeVar

from fleet.core.errors import BadInput
from web.http.refused_work import charged

P = ParamSpec("P")
T = TypeVar("T")
INLINE_BYTES = 16 * 1024
"""Size up to which a body is parsed in the event loop: at this size any content takes milliseconds.
"""
_reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fleet-reader")
"""Thread that parses large inputs. A single thread, so that only one input at a time expands in
memory.
"""
_preparers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="fleet-prompts")
"""Threads that make prompts, separate from the threads for audio: however long a prompt takes,
audio is encoded meanwhile.
"""


async def read_in_thread(read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `read`, which parses a large input, in the parser thread and return its result.

    Raises: the errors of `read`; Overloaded if the refused inputs of the same client address have
    recently cost too much time.
    """
    return await _Work(lambda: read(*args, **kwargs)).run(_reader)


async def read_input(is_large: bool, read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `read`, in the parser thread if its input is large, and return its result."""
    return await read_in_thread(read, *args, **kwargs) if is_large else read(*args, **kwargs)


async def parse_body(parse: Callable[[bytes], T], raw: bytes) -> T:
    return await read_input(len(raw) > INLINE_BYTES, parse, raw)


async def prepare_in_thread(
    is_large: bool, prepare: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call `prepare`, which makes a prompt, in a prompt thread, and return its result.

    Raises: the errors of `prepare`; if the input is large, Overloaded as in `read_in_thread`.
    """
    return await _Work(lambda: prepare(*args, **kwargs), is_large=is_large).run(_preparers)


class _Work(Generic[T]):
    """A call in a thread. The call's time is charged to the client's address if the call refuses
    the input or the client disconnects meanwhile. With `is_large`, the call is refused while the
    client's charged time is too high.
    """

    def __init__(self, call: Callable[[], T], *, is_large: bool = True) -> None:
        self._call = call
        self._is_large = is_large
        self._charged = charged.get()
        self._left = False

    async def run(self, pool: ThreadPoolExecutor) -> T:
        if self._charged is not None and self._is_large:
            self._charged.work.check(self._charged.sender)
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, self._timed)
        except asyncio.CancelledError:
            self._left = True
            raise

    def _timed(self) -> T:
        began, refused = time.perf_counter(), False
        try:
            return self._call()
        except BadInput:
            refused = True
            raise
        finally:
            if self._charged is not None and (refused or self._left):
                self._charged.work.add(self._charged.sender, time.perf_counter() - began)
