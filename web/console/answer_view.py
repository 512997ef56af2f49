"""An answer as the console shows it: its details, facts and verdict, its stored sound, its lanes.
Knows no page and no stage by name.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fleet.core.ids import RequestId, WorkerId
from web.console.answer_facts import AnswerFacts
from web.console.lanes import Axis, Waterfall
from web.console.listener import build_listener_lanes, find_axis
from web.console.stalls import find_stalls
from web.console.stored_sound import NO_SOUND, SoundReader, StoredSound
from web.console.verdict import AnswerVerdict, judge
from web.console.waterfall import build_lanes
from web.fleet_api.request_detail import (
    RequestDetail,
    has_sound,
    read_logs_without_audio,
    read_request_detail,
)
from web.fleet_api.walk_spans import EdgeLogs
from web.gateway.gateway import Gateway


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerView:
    """An answer. `logs` are the stored chunks of its edges except for its sound, which `sound`
    describes. `has_sound` is True while the sound can be played.
    """

    detail: RequestDetail
    facts: AnswerFacts
    verdict: AnswerVerdict
    sound: StoredSound
    has_sound: bool
    logs: EdgeLogs

    @property
    def axis(self) -> Axis:
        return find_axis(self.facts)

    def waterfall(self, axis: Axis | None = None) -> Waterfall:
        """Return the lanes of the answer. `axis`: time that they show, by default the whole
        answer.
        """
        return build_waterfall(self.facts, self.logs, self.sound, self.detail.heard, axis)


def build_waterfall(
    facts: AnswerFacts,
    logs: EdgeLogs,
    sound: StoredSound = NO_SOUND,
    heard: Sequence[str] = (),
    axis: Axis | None = None,
) -> Waterfall:
    """Return the lanes of the listener, then of the request. `heard`: transcripts of the user's
    sound. `axis`: time that the lanes show, by default the whole answer.
    """
    shown = axis or find_axis(facts)
    stalls = find_stalls(facts.trace, logs, sound.arrivals)
    listener = build_listener_lanes(facts, sound, shown, heard)
    lanes = (*listener, *build_lanes(facts, logs, shown, stalls))
    return Waterfall(lanes=lanes, labels=tuple(shown.labels()))


class AnswerLoader:
    """Reads answers, for one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._sounds = SoundReader(gateway)

    async def read(self, request: RequestId) -> AnswerView:
        """Return an answer. Raises: NotFound, RedisUnreachable."""
        detail = await read_request_detail(self._gateway, request)
        sound = await self._sounds.read(detail)
        facts = AnswerFacts(detail, self._gateway.graph, detail.audio_rate_hz, sound.arrivals)
        causes = await self._read_causes(loss.worker for loss in facts.losses())
        return AnswerView(
            detail=detail,
            facts=facts,
            verdict=judge(facts, causes),
            sound=sound,
            has_sound=await has_sound(self._gateway, request),
            logs=await read_logs_without_audio(self._gateway, detail),
        )

    async def _read_causes(self, workers: Iterable[str]) -> Mapping[str, str]:
        """Return why workers ended, by worker id, for those whose records are still kept."""
        telemetry = self._gateway.client.telemetry
        views = [await telemetry.worker(WorkerId(worker)) for worker in dict.fromkeys(workers)]
        return {view.id: view.cause for view in views if view is not None and view.cause}
