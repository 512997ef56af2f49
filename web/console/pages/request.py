"""The page of one request: its outcome, timeline, text and audio, and its log lines.

Knows no stage by name.
"""

import re
import shlex
from dataclasses import dataclass, replace
from http import HTTPStatus

from fleet.core.errors import NotFound
from fleet.core.ids import CLIENT, request_id_of
from fleet.telemetry.trace import LIVE_STATES, EdgeTrace, TaskTrace
from fleet.telemetry.views import LogLine
from web.console.answer_facts import AnswerFacts
from web.console.answer_view import AnswerLoader, AnswerView
from web.console.lanes import Waterfall
from web.console.page_context import LivePage, PageContext, Query
from web.console.verdict import AnswerVerdict
from web.fleet_api.request_detail import RequestDetail, read_lines
from web.gateway.gateway import Gateway

NUM_LINES = 100
ROLE = re.compile(r"^(?P<role>system|user|assistant|tool):?$", re.MULTILINE)
"""Line of a prompt's text that names the role of the message after it."""
_KEY = '-H "Authorization: Bearer $FLEET_API_KEY"'
"""Option of curl for the API key. If the variable is unset, the key is empty, which a fleet without
a key ignores.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioPlayer:
    """Player of an answer's audio on the page. `played_s` is the time that the client has reported
    as played, None without a report. `stored` is True if the audio can still be played. Units:
    seconds.
    """

    src: str
    total_s: float
    played_s: float | None
    underruns: int
    stored: bool

    @property
    def played_permille(self) -> int:
        return round(1000 * min((self.played_s or 0.0) / self.total_s, 1.0)) if self.total_s else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPrompt:
    """A prompt in two parts: its last turn, and everything before that turn, "" if there is
    nothing.
    """

    turn: str
    earlier: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OneRequestContext(PageContext):
    """Data of the page of one request.

    `detail` holds state, tasks and edges of the request, None if the request is unknown.
    `text_edge` is the name of the edge that brings the answer's text to the client. `exports` is
    True if answers are exported to a collector, where their trace ids find them.
    """

    id: str
    text_edge: str = ""
    detail: RequestDetail | None = None
    facts: AnswerFacts | None = None
    verdict: AnswerVerdict | None = None
    waterfall: Waterfall | None = None
    tasks: tuple[TaskTrace, ...] = ()
    player: AudioPlayer | None = None
    lines: tuple[LogLine, ...] = ()
    exports: bool = False

    @property
    def live(self) -> bool:
        return self.detail is not None and self.detail.state in LIVE_STATES

    def curl(self, origin: str) -> str:
        """Return a curl command that repeats the request at the server `origin`; "" for an unknown
        request.
        """
        return build_curl_command(self.detail, origin) if self.detail is not None else ""

    @property
    def said(self) -> str:
        """The answer's text, or why there is none: its edge's log may have expired before the
        request.
        """
        if self.detail is None or self.detail.answer:
            return self.detail.answer if self.detail is not None else ""
        if any(edge.name == self.text_edge and edge.items for edge in self.detail.edges):
            return "The text is not stored."
        return "No text yet." if self.live else "No text."

    @property
    def prompt(self) -> TurnPrompt:
        """The prompt of this answer's own turn, and the turns before it."""
        return split_prompt(self.detail.prompt if self.detail is not None else "")

    def plain_name(self, edge: EdgeTrace) -> str:
        return self.facts.plain_name(edge) if self.facts is not None else edge.name

    @property
    def took_ms(self) -> float:
        detail = self.detail
        return (
            0.0
            if detail is None
            else ((detail.ended_us or detail.now_us) - detail.created_us) / 1000
        )


def split_prompt(prompt: str) -> TurnPrompt:
    """Divide the text of a prompt at its last user message. A text that names no roles is returned
    whole, as the turn.
    """
    marks = [*ROLE.finditer(prompt)]
    last = next((mark for mark in reversed(marks) if mark["role"] == "user"), None)
    if last is None:
        return TurnPrompt(turn=prompt, earlier="")
    following = (mark.start() for mark in marks if mark.start() > last.start())
    turn = prompt[last.end() : next(following, len(prompt))].strip()
    return TurnPrompt(turn=turn, earlier=prompt[: last.start()].strip())


class OneRequestPage(LivePage):
    key = "request"
    active = "requests"
    path = "/requests/{id}"
    live = ("trouble", "verdict", "summary", "lanes", "text", "tasks", "edges", "events", "log")

    def __init__(self, gateway: Gateway, answers: AnswerLoader) -> None:
        super().__init__(gateway)
        self._answers = answers

    def empty(self, query: Query) -> OneRequestContext:
        request = request_id_of(query["id"])
        return OneRequestContext(id=request, stream_query={"id": request})

    async def read(self, query: Query) -> OneRequestContext:
        """Return the data of the request named in `query`. For a request that is no longer stored,
        only its log lines are shown, with the status 404.

        Raises: RedisUnreachable.
        """
        request = request_id_of(query["id"])
        lines = await read_lines(self._gateway, request, NUM_LINES)
        found = replace(self.empty(query), lines=lines)
        try:
            answer = await self._answers.read(request)
        except NotFound as error:
            return replace(found, trouble=error.message, status=HTTPStatus.NOT_FOUND)
        return replace(
            found,
            detail=answer.detail,
            text_edge=self._gateway.edges.text,
            exports=self._gateway.config.telemetry.otlp.endpoint is not None,
            facts=answer.facts,
            verdict=answer.verdict,
            waterfall=answer.waterfall(),
            tasks=tuple(task for task in answer.detail.tasks if task.stage != CLIENT),
            player=_player_of(answer),
        )


def _player_of(answer: AnswerView) -> AudioPlayer | None:
    detail = answer.detail
    if not detail.audio_samples or not detail.audio_rate_hz:
        return None
    report = detail.playback
    return AudioPlayer(
        src=f"/v1/fleet/requests/{detail.id}/audio",
        total_s=detail.audio_samples / detail.audio_rate_hz,
        played_s=report.played_samples / detail.audio_rate_hz if report is not None else None,
        underruns=report.underruns if report is not None else 0,
        stored=answer.has_sound,
    )


def build_curl_command(detail: RequestDetail, origin: str) -> str:
    """Return a curl command that repeats a request: with its body if the body is stored, otherwise
    by a retry of the stored request.
    """
    if not detail.body:
        return f"curl -X POST {shlex.quote(f'{origin}/v1/fleet/requests/{detail.id}/retry')} {_KEY}"
    sent = f"-H 'Content-Type: application/json' \\\n  -d {shlex.quote(detail.body)}"
    return f"curl {shlex.quote(f'{origin}/v1/chat/completions')} {_KEY} \\\n  {sent}"
