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


async def parse_body(parse: Callable[[bytes], T], raw: bytes) -> T:
    """Parse a body, in the thread if it is large."""
    return parse(raw) if len(raw) <= INLINE_BYTES else await read_in_thread(parse, raw)
