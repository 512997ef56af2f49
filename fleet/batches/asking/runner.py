"""Sends many lines, a bounded number at one time, and writes their answers. Knows no batch."""

import asyncio
from collections.abc import Callable, Iterable, Iterator

from fleet.batches.asking.answers import AnswerFiles
from fleet.batches.asking.gateway import LineGateway
from fleet.batches.lines import BatchLine

POLL_S = 0.5
"""Time between two looks at whether to go on."""


async def answer_lines(
    lines: Iterable[BatchLine],
    gateway: LineGateway,
    answers: AnswerFiles,
    concurrency: int,
    go_on: Callable[[], bool],
) -> None:
    """Answer the lines that have no answer yet, `concurrency` at one time, until all have one.

    `go_on` is called every half second, and ends the run when it returns False: lines under way
    are given up, and have no answer. Raises: the errors of `LineGateway.ask` and `AnswerFiles.add`.
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
