"""Thread pools whose size does not depend on the load that they have seen."""

import threading
from concurrent.futures import ThreadPoolExecutor


def full_thread_pool(size: int, name: str) -> ThreadPoolExecutor:
    """Return a pool of which all threads run: a burst starts none, and more threads later on mean a
    leak.
    """
    pool = ThreadPoolExecutor(size, thread_name_prefix=name)
    together = threading.Barrier(size + 1)
    for _ in range(size):
        pool.submit(together.wait)
    together.wait()
    return pool
