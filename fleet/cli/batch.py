"""`fleet batch`: answers the requests of a file with a running fleet, and continues after an
interruption.
"""

import asyncio
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleet.cli.deployment import open_deployment
from fleet.cli.jobs import gateway_url
from fleet.cli.options import ConfigFile, Overrides
from fleet.core.errors import BadInput

if TYPE_CHECKING:
    from fleet.batches.asking.answers import AnswerFiles
    from fleet.batches.asking.gateway import LineGateway

SHOWN_FAULTS = 10
TERMINAL_S, LOG_S = 1.0, 10.0
"""Seconds between two lines of progress, on a terminal and in a log."""
INTERRUPTED = 130


def batch(
    requests: Annotated[
        Path, typer.Argument(metavar="IN.jsonl", help="The requests, one JSON object a line.")
    ],
    answers: Annotated[
        Path, typer.Argument(metavar="OUT.jsonl", help="The answers, one JSON object a line.")
    ],
    url: Annotated[
        str | None,
        typer.Option(help="The gateway. Default: the deployment's gateway on this machine."),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, max=256, help="Lines at one time. Default: batches.concurrency."),
    ] = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Answer the requests of a file with a running fleet, in the background of its other requests.

    A line of IN.jsonl is a request as in OpenAI's Batch API: custom_id, a name of your choice;
    url, /v1/chat/completions or /v1/audio/speech; and body, what would be sent to that url. A line
    of OUT.jsonl has the custom_id and the response, with the status_code and the answer as body
    (speech as base64). Answers are in the order in which they are complete. Requests that fail are
    in OUT.errors.jsonl instead, with the error; remove that file to try them again.

    After an interruption the same command continues: lines that have an answer are not sent again.
    While the gateway is away or busy, lines wait. FLEET_API_KEY is the gateway's key, if it
    requires one.

    The exit status is 0 if all lines have an answer, 1 if some have an error.

    Example:

      echo '{"custom_id": "a", "url": "/v1/chat/completions", "body": {"model": "pocket",
      "messages": [{"role": "user", "content": "Hello"}]}}' > in.jsonl

      fleet batch in.jsonl out.jsonl
    """
    from fleet.batches.asking.answers import AnswerFiles
    from fleet.batches.asking.gateway import LineGateway

    if answers.resolve() == requests.resolve():
        raise BadInput("OUT.jsonl: it must be another file than IN.jsonl", param="answers")
    deployment = open_deployment(config, set_)
    total, errors = _count_lines(requests), answers.with_suffix(f".errors{answers.suffix}")
    num_at_once = concurrency or deployment.config.batches.concurrency
    with closing(AnswerFiles(answers, errors)) as files:
        gateway = LineGateway(url or gateway_url(deployment), deployment.settings.api_key)
        try:
            asyncio.run(_answer(requests, gateway, files, _ProgressLine(total, files), num_at_once))
        except KeyboardInterrupt:
            print("\nfleet batch: stopped; the same command continues", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        if not files.num_failed:
            errors.unlink()
        raise typer.Exit(1 if files.num_failed else 0)


def _count_lines(requests: Path) -> int:
    """Check the file of requests, and return the number of its lines. Raises: BadInput."""
    from fleet.batches.lines import find_faults
    from fleet.batches.records import ENDPOINTS

    total, faults = find_faults(requests, ENDPOINTS)
    if faults:
        shown = "\n".join(
            f"  line {fault.line}: {fault.message}" if fault.line else f"  {fault.message}"
            for fault in faults[:SHOWN_FAULTS]
        )
        raise BadInput(f"{requests} cannot be sent:\n{shown}", param="requests")
    return total


async def _answer(
    requests: Path,
    gateway: "LineGateway",
    files: "AnswerFiles",
    progress: "_ProgressLine",
    concurrency: int,
) -> None:
    from fleet.batches.asking.runner import answer_lines
    from fleet.batches.lines import read_lines

    def show() -> bool:
        progress.show(gateway.trouble)
        return True

    async with gateway:
        await answer_lines(read_lines(requests), gateway, files, concurrency, show)
    progress.show("", is_last=True)


class _ProgressLine:
    """The line of progress on stderr. `total`: lines of the input."""

    def __init__(self, total: int, files: "AnswerFiles") -> None:
        self._total = total
        self._files = files
        self._is_terminal = sys.stderr.isatty()
        self._shown_s = 0.0

    def show(self, trouble: str, *, is_last: bool = False) -> None:
        """Print the numbers of answered lines and the gateway's `trouble` ("": none); without
        `is_last`, at most once per `TERMINAL_S` on a terminal, else per `LOG_S`.
        """
        pause_s = TERMINAL_S if self._is_terminal else LOG_S
        if not is_last and time.monotonic() - self._shown_s < pause_s:
            return
        self._shown_s = time.monotonic()
        text = f"fleet batch: {len(self._files.done)} of {self._total} lines answered"
        text += f", {self._files.num_failed} with errors" if self._files.num_failed else ""
        text += f"; waiting: {trouble}" if trouble else ""
        end = "\n" if is_last or not self._is_terminal else ""
        print(
            f"\r{text}\033[K" if self._is_terminal else text, end=end, file=sys.stderr, flush=True
        )
