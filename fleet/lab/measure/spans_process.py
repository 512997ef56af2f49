"""Start of the processes that a benchmark of layer spans measures (an anchor and its span workers),
and exchange of commands and replies with them. Knows no layers.
"""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from fleet.config import FleetConfig
from fleet.lab.measure.calls import ProcessCall, ProcessSettings
from fleet.lab.measure.spans_protocol import Connect, SpanCommand, SpanReply

STAGE, SPAN = "fleet.lab.measure.spans_run:host_stage", "fleet.lab.measure.spans_run:host_span"
LOOPBACK = "127.0.0.1"
KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Where a process runs. `command`: prefix of its command line, such as `ip netns exec NAME`;
    empty for none. `host`: address on which the process listens.
    """

    command: Sequence[str] = ()
    host: str = LOOPBACK


class SpanProcess(ProcessCall):
    """A child process that replies to commands in order."""

    def run(self, command: SpanCommand) -> SpanReply:
        """Send a command and return its reply. Raises: BenchError if the command failed."""
        return self.ask(command, SpanReply)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanGroup:
    """Processes that serve one model: an anchor and its span workers in layer order, or one process
    with all layers and no workers.
    """

    anchor: SpanProcess
    workers: Sequence[SpanProcess]


@contextmanager
def span_group(
    name: str,
    config: FleetConfig,
    num_workers: int,
    cores: Sequence[int],
    *,
    data_limit_bytes: int | None = None,
    places: Sequence[ProcessPlace] = (),
) -> Iterator[SpanGroup]:
    """Start the processes of a model, each on one of `cores` in turn; stop them at the end of the
    block.

    `data_limit_bytes`: RLIMIT_DATA of each process. `places`: places of the anchor and of each
    worker; empty to run all of them on the loopback address. Raises: BenchError.
    """
    key = secrets.token_hex(KEY_BYTES)
    names = [name, *(f"{name}-worker-{number}" for number in range(1, num_workers + 1))]
    with ExitStack() as stack:
        started: list[SpanProcess] = []
        for number, each in enumerate(names):
            place = places[number] if places else ProcessPlace()
            settings = ProcessSettings(
                num_threads=1,
                command=place.command,
                core=cores[number % len(cores)] if cores else None,
                data_limit_bytes=data_limit_bytes,
            )
            arguments = (SPAN if number else STAGE, config, each, key, place.host)
            process = SpanProcess(*arguments, name=each, settings=settings)
            started.append(stack.enter_context(process))
        replies = {process.name: process.receive(SpanReply) for process in started}
        addresses: dict[str, Any] = {
            each: reply.address for each, reply in replies.items() if reply.address
        }
        if addresses:
            for process in (*started[1:], started[0]):
                process.run(Connect(addresses=addresses))
        yield SpanGroup(anchor=started[0], workers=started[1:])
