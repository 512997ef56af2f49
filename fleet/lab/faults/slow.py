"""Clients that read their answers at a few bytes a second for a while, and then the rest. Every
answer must be the reference answer nevertheless, and the other clients' answers whole.
"""

import threading
from collections.abc import Callable, Sequence

import msgspec

from fleet.lab.client.client import ApiClient
from fleet.lab.client.transport import OpenResponse
from fleet.lab.faults.answer import ReceivedAnswer
from fleet.lab.faults.clients import Gateways, ResumableStream
from fleet.lab.faults.load import ChaosLoad, Outcome

SLOW_S = 10.0
"""Time for which the clients read slowly: ten times `lease.park_after_s`, and less than
`web.send_timeout_s`, after which a gateway closes such a connection.
"""
READ_BYTES, READ_PERIOD_S = 4, 1.0


class SlowGateways(Gateways):
    """Client of all gateways that reads a few bytes a second until `hurry` is set."""

    def __init__(self, urls: Sequence[str], api_key: str | None = None) -> None:
        super().__init__(urls, api_key)
        self.hurry = threading.Event()

    def _read_piece(self, response: OpenResponse) -> bytes:
        if self.hurry.wait(READ_PERIOD_S):
            return response.read()
        return response.read(READ_BYTES)

    def _open(self, api: ApiClient, body: bytes, stream: ResumableStream) -> OpenResponse:
        if stream.request_id:
            return super()._open(api, body, stream)
        return api.open_chat(body, timeout_s=self._timeout_s, small_buffers=True)


class SlowReaders:
    """A group of slow clients, which can be used for several disturbances of a chaos run.
    `outcomes`: outcomes of their requests in all disturbances so far.

    `count`: number of clients. `bodies`, `expected`: requests of the run and their reference
    answers; the clients use the first ones.
    """

    def __init__(
        self,
        open_gateways: Callable[[], SlowGateways],
        bodies: Sequence[bytes],
        expected: Sequence[ReceivedAnswer],
        count: int,
        *,
        may_forget: bool = False,
    ) -> None:
        self._open_gateways = open_gateways
        self._num_bodies = len(bodies)
        self._bodies = [bodies[at % len(bodies)] for at in range(count)]
        self._expected = [expected[at % len(bodies)] for at in range(count)]
        self._may_forget = may_forget
        self.outcomes: list[Outcome] = []

    @property
    def count(self) -> int:
        return len(self._bodies)

    def read(self, now_s: Callable[[], float], slow_s: float = SLOW_S) -> tuple[float, list[str]]:
        """Send the requests, read the answers slowly for `slow_s`, then read the rest at full
        speed. Adds to `outcomes`. `now_s`: clock of the phase. Return the time at which slow
        reading ended, and the ids of the requests.
        """
        gateways, began_s = self._open_gateways(), now_s()
        load = ChaosLoad(
            gateways, self._bodies, self._expected, may_forget=self._may_forget, once=True
        )
        try:
            load.start(self.count, lambda: None)
            gateways.hurry.wait(slow_s)  # nothing sets it: a pause
            hurry_s = now_s()
            gateways.hurry.set()
            ended = [self._in_phase(outcome, began_s) for outcome in load.finish()]
        finally:
            gateways.hurry.set()
            load.abandon()
        self.outcomes += ended
        return hurry_s, [outcome.id for outcome in ended if outcome.id]

    def _in_phase(self, outcome: Outcome, began_s: float) -> Outcome:
        """Return an outcome of this disturbance with the number of its request in the run, and with
        times since the phase began. `began_s`: start of the disturbance on the clock of the phase.
        """
        return msgspec.structs.replace(
            outcome,
            request=outcome.request % self._num_bodies,
            sent_s=outcome.sent_s + began_s,
            ended_s=outcome.ended_s + began_s,
        )
