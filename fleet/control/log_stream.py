"""Sender of this process's log lines to the fleet's log in Redis: in batches and in its own thread,
so that logging never blocks.

Lines of one kind are limited (`line_budget.py`). Under load, or while Redis is away, lines are
dropped and counted. Printed lines are not affected.
"""

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from redis import Redis
from redis.exceptions import RedisError
from redis.typing import EncodableT, FieldT

from fleet.control import keys, scripts
from fleet.control.connect import connect_for_a_call, run
from fleet.control.line_budget import PERIOD_S, LineBudget
from fleet.core.log_labels import Labels

MAX_WAITING, MAX_BATCH = 2000, 200
MAX_STORED = 20_000
MAX_MESSAGE_CHARS, MAX_TRACE_CHARS = 4000, 8000
PAUSE_S, TIMEOUT_S, CLOSE_S = 0.2, 2.0, 2.0
REQUEST = re.compile(r"\breq-[0-9a-f]{22}\b")
Fields = dict[FieldT, EncodableT]


class LogShipper(logging.Handler):
    """Logging handler that sends the records of all threads to the fleet's log. `end` sends waiting
    lines within a time limit and stops the handler. `close` does not, because configuring logging
    (as uvicorn does) closes every existing handler and leaves it in use.

    Invariants: `emit` does no I/O, and runs under the handler's lock; at most `MAX_WAITING` lines
    wait; the stream keeps about `MAX_STORED`.
    """

    def __init__(self, client: Redis, labels: Labels) -> None:
        super().__init__(logging.INFO)
        self._client = client
        self._labels = labels
        self._waiting: deque[Fields] = deque()
        self._dropped = 0
        self._budget = LineBudget()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if threading.current_thread() is self._thread:
            return
        if self._budget.admits(record, time.monotonic()):
            self._add(record)

    def _add(self, record: logging.LogRecord) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._dropped += 1
            return
        try:
            self._waiting.append(fields_of(record, self._labels))
        except (TypeError, ValueError):
            self.handleError(record)

    def end(self) -> None:
        self._stopping.set()
        self._thread.join(CLOSE_S + TIMEOUT_S)
        self._client.close()
        self.close()

    def _run(self) -> None:
        while not self._stopping.wait(PAUSE_S):
            self._add_summaries(time.monotonic())
            self._ship()
        self._add_summaries(time.monotonic() + PERIOD_S)
        until = time.monotonic() + CLOSE_S
        while self._waiting and time.monotonic() < until and self._ship():
            pass

    def _add_summaries(self, now: float) -> None:
        self.acquire()  # as `handle` does around `emit`
        try:
            for record in self._budget.take_summaries(now):
                self._add(record)
        finally:
            self.release()

    def _ship(self) -> bool:
        """Send the waiting lines in batches. Return False if Redis does not answer; unsent lines
        then wait for the next call.
        """
        while self._waiting:
            batch = [self._waiting[place] for place in range(min(len(self._waiting), MAX_BATCH))]
            dropped = self._dropped
            try:
                pipe = self._client.pipeline(transaction=False)
                for fields in batch:
                    pipe.xadd(keys.LOGS, fields, maxlen=MAX_STORED, approximate=True)
                if dropped:
                    pipe.incrby(keys.LOGS_DROPPED, dropped)
                pipe.execute()
            except RedisError:
                return False
            for _ in batch:
                self._waiting.popleft()
            self._dropped -= dropped
        return True


def fields_of(record: logging.LogRecord, labels: Labels) -> Fields:
    """Return the stream fields of a log record. The request id and the epoch come from the record's
    `extra`; without a request id there, the first one in the message is used.
    """
    message = record.getMessage()
    about = getattr(record, "request_id", "") or next(iter(REQUEST.findall(message)), "")
    fields: Fields = {
        "t": int(record.created * 1e6),
        "l": record.levelname.lower(),
        "n": record.name,
        "m": message[:MAX_MESSAGE_CHARS],
        "p": labels.process,
    }
    rest = {"w": labels.worker, "s": labels.stage, "r": about, "e": getattr(record, "epoch", 0)}
    trace = (
        logging.Formatter().formatException(record.exc_info)
        if record.exc_info
        else record.stack_info or ""
    )
    return fields | {
        name: value for name, value in (*rest.items(), ("x", trace[-MAX_TRACE_CHARS:])) if value
    }


def add_line(client: Redis, labels: Labels, message: str, *, level: str) -> None:
    """Add a line to the fleet's log immediately, in a process without a LogShipper. Raises:
    redis-py's errors.
    """
    run(client, scripts.log_fact(level, labels.process, labels.worker, labels.stage, message))


@contextmanager
def shipping(redis_url: str, labels: Labels) -> Iterator[Labels]:
    """Send the log lines of this process to the fleet's log within the block. Yields the labels,
    which may be changed.
    """
    shipper = LogShipper(connect_for_a_call(redis_url, TIMEOUT_S), labels)
    logging.getLogger().addHandler(shipper)
    try:
        yield labels
    finally:
        logging.getLogger().removeHandler(shipper)
        shipper.end()
