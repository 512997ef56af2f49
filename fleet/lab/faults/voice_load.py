"""Voice sessions of a chaos run, each on a thread of its own. Knows no turn."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from fleet.lab.client.audio import read_wav
from fleet.lab.client.client import ApiClient
from fleet.lab.faults.client_threads import ClientThreads
from fleet.lab.faults.voice import GIVE_UP_S, ChaosSession, VoiceConversation


class VoiceLoad:
    """Load of `count` voice sessions, each on its own thread. `clips`: spoken questions as WAV
    files; () if all questions are typed.
    """

    def __init__(
        self,
        urls: Sequence[str],
        api_key: str | None,
        model: str,
        count: int,
        seed: int,
        clips: Sequence[bytes] = (),
    ) -> None:
        self._threads = ClientThreads()
        self._began_s = time.perf_counter()
        apis = [ApiClient(url, api_key) for url in urls]
        spoken = [read_wav(clip) for clip in clips]
        self._clients = [
            VoiceConversation(number, apis, model, seed, self._now_s, self._threads, spoken)
            for number in range(count)
        ]
        self._results: dict[int, ChaosSession] = {}

    def _now_s(self) -> float:
        return time.perf_counter() - self._began_s

    def running(self, step: Callable[[], None]) -> AbstractContextManager[None]:
        """Run the voice sessions during the block. `step` is called after each turn."""

        def run(number: int) -> None:
            self._results[number] = self._clients[number].run(step)

        self._began_s = time.perf_counter()
        return self._threads.running(len(self._clients), run)

    def finish(self, timeout_s: float = 3 * GIVE_UP_S) -> tuple[ChaosSession, ...]:
        """Wait for the last answers and return the results; an answer that does not end is a lost
        turn.
        """
        self._threads.join(timeout_s)
        self._threads.cancelled.set()
        return tuple(
            self._results.get(number) or client.unfinished()
            for number, client in enumerate(self._clients)
        )
