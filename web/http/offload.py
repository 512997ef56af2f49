"""A thread for parsing large inputs, which would stall all other connections in the event loop.

One thread, so that inputs are expanded in memory one after another.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
INLINE_BYTES = 16 * 1024
"""A smaller body is parsed within milliseconds for any content."""
_reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fleet-reader")


async def read_in_thread(read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return await asyncio.get_running_loop().run_in_executor(_reader, lambda: read(*args, **kwargs))


async def read_input(is_large: bool, read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `read`, in the thread if its input is large."""
    return await read_in_thread(read, *args, **kwargs) if is_large else read(*args, **kwargs)


async def parse_body(parse: Callable[[bytes], T], raw: bytes) -> T:
    return await read_input(len(raw) > INLINE_BYTES, parse, raw)
