"""A checked chat request before and after its submission. Knows no endpoint."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from fleet.control.client import Applicant
from fleet.core.request import RequestSpec, session_name
from web.gateway.answer import AnswerStream

SPEED, CLAUSE = "speed", "clause"
"""Keys of `RequestSpec.params`. SPEED: pace of the voice, 1 if absent. CLAUSE: place of the text to
speak within the longer text that it is a clause of; absent for a whole text.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedChat:
    """A checked chat request that is not submitted yet. `blob` is the audio of its prompt, float32
    mono, None without audio; `spoken` is True if the answer has audio; `applicant` is the request's
    entry in the queue for admission.
    """

    spec: RequestSpec
    blob: bytes | None
    seed: int
    spoken: bool
    applicant: Applicant

    def at_speed(self, speed: float) -> "PreparedChat":
        """Return the request with another pace of its voice; 1 is the voice's own."""
        return self._with_params({SPEED: str(speed)}) if speed != 1 else self

    def as_clause(self, place: str) -> "PreparedChat":
        """Return the request with its text spoken as one clause of a longer text, in which `place`
        is the place of the clause.
        """
        return self._with_params({CLAUSE: place})

    def _with_params(self, added: dict[str, str]) -> "PreparedChat":
        params = self.spec.params | added
        return replace(self, spec=msgspec.structs.replace(self.spec, params=params))

    def in_conversation(self, name: str) -> "PreparedChat":
        """Return the request as a turn of the conversation `name`, whose computed prefix it
        reuses.
        """
        return replace(self, spec=msgspec.structs.replace(self.spec, session=session_name(name)))

    def headers(self, ignored: Sequence[str]) -> dict[str, str]:
        """Return the response headers of the answer. `ignored` lists fields of the request that
        have no effect.
        """
        headers = {"x-fleet-seed": str(self.seed)}
        if (voice := self.spec.params.get("voice")) is not None:
            headers["x-fleet-voice"] = voice
        if ignored:
            headers["x-fleet-ignored"] = ", ".join(
                ascii(name[:64])[1:-1][:64] for name in ignored[:32]
            )
        return headers


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveRequest:
    """A submitted request and its answer."""

    chat: PreparedChat
    answer: AnswerStream
