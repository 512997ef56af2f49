"""Sends many lines, a bounded number at one time, and writes their answers. Knows no batch."""

import asyncio
from collections.abc import Callable, Iterable, Iterator

from fleet.batches.asking.answers import AnswerFiles
from fleet.batches.asking.gateway import LineGateway
from fleet.batches.lines import BatchLine

POLL_S = 0.5
"""Seconds between two calls of `go_on`."""


async def answer_lines(
    lines: Iterable[BatchLine],
    gateway: LineGateway,
    answers: AnswerFiles,
    concurrency: int,
    go_on: Callable[[], bool],
) -> None:
    """Send the lines that have no answer yet, at most `concurrency` at one time, and write their
    answers, until all lines have one or `go_on` returns False.

    `go_on` is called at least every half second. When it returns False, requests in progress are
    cancelled and their lines have no answer. Raises: the errors of `LineGateway.ask` and
    `AnswerFiles.add`.
    """
    shared = iter(lines)
    workers = [
        asyncio.create_task(_answer_some(shared, gateway, answers)) for _ in range(concurrency)
    ]
    try:
        while go_on():
            done, left = await asyncio.wait(
                workers, timeout=POLL_S, return_when=asyncio.FIRST_EXCEPTION
            )
            for worker in done:
                worker.result()
            if not left:
                return
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def _answer_some(
    shared: Iterator[BatchLine], gateway: LineGateway, answers: AnswerFiles
) -> None:
    """Answer lines of `shared`, which other tasks read too, as long as there are any."""
    for line in shared:
        if line.custom_id not in answers.done:
            answers.add(await gateway.ask(line))
