"""The stored sound of an answer as the console draws it: peaks, times of its chunks, words.

Sound is read only while it is stored, and only of answers that have ended, since it then changes no
more: each is read once. Peaks are computed in a thread.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fleet.core.chunk import Chunk
from fleet.core.ids import RequestId
from fleet.telemetry.trace import LIVE_STATES
from web.console.answer_facts import Arrival
from web.fleet_api.request_detail import RequestDetail
from web.gateway.answer_words import AnswerWords
from web.gateway.gateway import Gateway
from web.gateway.word_times import WordTime, WordTimes

NUM_PEAKS = 300
MAX_BYTES = 32 << 20
"""Size up to which sound is read, eleven minutes at 24 kHz. Longer sound is not drawn."""
MAX_KNOWN = 32
"""Number of answers whose peaks are cached, since an open page is read again every two seconds."""
FULL_SCALE = 32768
PCM = "pcm"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSound:
    """An answer's sound as it is drawn. `peaks` are the highest levels, 0 to 1, of equal parts of
    the sound. `arrivals` are the sound's chunks, empty if a chunk has no time; `words` are its
    words, empty unless the voice reports their times.
    """

    peaks: tuple[float, ...] = ()
    arrivals: tuple[Arrival, ...] = ()
    words: tuple[WordTime, ...] = ()


NO_SOUND = StoredSound()


class SoundReader:
    """Reads the stored sound of answers, for one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._known: OrderedDict[RequestId, StoredSound] = OrderedDict()

    async def is_stored(self, detail: RequestDetail) -> bool:
        edge = self._gateway.edges.audio
        telemetry = self._gateway.client.telemetry
        return edge is not None and await telemetry.has_edge_log(detail.id, edge)

    async def read(self, detail: RequestDetail) -> StoredSound:
        """Return the sound of an answer that has ended; `NO_SOUND` if it is not stored, or if it is
        larger than `MAX_BYTES`. Raises: RedisUnreachable.
        """
        edge = self._gateway.edges.audio
        is_bounded = all(e.num_bytes <= MAX_BYTES for e in detail.edges if e.name == edge)
        if edge is None or detail.state in LIVE_STATES or not is_bounded:
            return NO_SOUND
        if not await self.is_stored(detail):
            self._known.pop(detail.id, None)
            return NO_SOUND
        if detail.id not in self._known:
            chunks = await self._gateway.client.telemetry.edge_log(detail.id, edge)
            read = await asyncio.to_thread(read_sound, chunks, detail.audio_rate_hz)
            self._known[detail.id] = read
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return self._known[detail.id]


def read_sound(chunks: Sequence[Chunk], rate_hz: int) -> StoredSound:
    """Return what is drawn of the chunks of an answer's sound. If a chunk has no time, arrivals are
    unknown.
    """
    words, pieces = AnswerWords(), list[np.ndarray]()
    arrivals: list[Arrival] = []
    for chunk in chunks:
        words.add(chunk)
        tensor = chunk.tensors.get(PCM)
        if tensor is None or not tensor.data:
            continue
        pieces.append(np.frombuffer(tensor.data, "<i2"))
        arrivals.append(Arrival(at_us=chunk.produced_us, samples=len(pieces[-1])))
    ends = words.ends(0)
    return StoredSound(
        peaks=peaks_of(np.concatenate(pieces)) if pieces else (),
        arrivals=tuple(arrivals) if all(arrival.at_us for arrival in arrivals) else (),
        words=tuple(WordTimes(words.text, rate_hz).take(ends)) if ends and rate_hz else (),
    )


def peaks_of(pcm: np.ndarray, num_peaks: int = NUM_PEAKS) -> tuple[float, ...]:
    """Return the highest level of each of at most `num_peaks` equal parts of sound.

    Shapes: `pcm` int16 [samples], at least one. Units: levels from 0 to 1 (full scale).
    """
    starts = np.unique(
        np.linspace(0, len(pcm), min(num_peaks, len(pcm)), endpoint=False, dtype=int)
    )
    highest = np.maximum.reduceat(pcm, starts).astype(int)
    lowest = np.minimum.reduceat(pcm, starts).astype(int)
    levels = np.maximum(highest, -lowest) / FULL_SCALE
    return tuple(round(float(level), 3) for level in levels)
