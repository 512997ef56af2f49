"""Protection of a voice session from the model's own voice in the microphone, which would interrupt
the model.

Input that resembles what was played just before begins no turn. If a response is interrupted by its
own echo all the same, the session becomes half duplex: input is silent while a response is audible.
"""

import logging

import numpy as np

from fleet.processing.voice_activity import RATE_HZ
from web.gateway.answer import BYTES_PER_SAMPLE
from web.realtime.audio.echo import ECHO_SCORE, MAX_DELAY_S, MAX_LEAD_S, echo_score
from web.realtime.audio.formats import OUTPUT_RATE_HZ
from web.realtime.context import SessionContext
from web.realtime.response_manager import ResponseManager
from web.realtime.session_views import shown_id
from web.realtime.states import ResponseActivity

log = logging.getLogger("fleet.web")


class EchoGuard:
    def __init__(self, context: SessionContext, responses: ResponseManager) -> None:
        self.is_half_duplex = False
        self._context, self._responses = context, responses
        self._audible_until = 0.0
        """Time until which an echo of the last response may arrive."""

    def is_echo(self, heard: bytes, ago_s: float = 0.0) -> bool:
        """Return True if `heard`, input that ended `ago_s` seconds ago (PCM16 at 16 kHz), is what
        was played just before.
        """
        played = self._played(len(heard) / BYTES_PER_SAMPLE / RATE_HZ, ago_s)
        if not played:
            return False
        samples = np.frombuffer(heard, "<i2")
        score = echo_score(samples, np.frombuffer(played, "<i2"), OUTPUT_RATE_HZ)
        return score >= ECHO_SCORE

    def on_self_interruption(self) -> None:
        """Make the session half duplex, since a response was interrupted by its echo."""
        if not self.is_half_duplex:
            log.info(
                "session %s: a response was interrupted by its own echo; input counts as silence "
                "while a response is audible",
                shown_id(self._context.settings.id),
            )
        self.is_half_duplex = True

    def reset(self) -> None:
        """Make the session full duplex again, since its audio input was set up anew."""
        self.is_half_duplex = False

    def pass_on(self, piece: bytes) -> bytes:
        """Return `piece`, a piece of input, or silence of its length if the session is half duplex
        and an echo may arrive.
        """
        return bytes(len(piece)) if self._may_echo() and self.is_half_duplex else piece

    def _may_echo(self) -> bool:
        now = self._context.clock.now()
        if self._responses.activity is ResponseActivity.AUDIBLE:
            self._audible_until = now + MAX_DELAY_S
        return now < self._audible_until

    def _played(self, heard_s: float, ago_s: float) -> bytes:
        """Return the audio that may be echoed in `heard_s` of input which ended `ago_s` seconds
        ago, PCM16 at the rate of the output, with silence before it; empty if none was played.
        """
        response = self._responses.current
        if response is None or not self._may_echo():
            return b""
        at = response.playhead.position(self._context.clock.now())
        first = at - int((heard_s + ago_s + MAX_DELAY_S) * OUTPUT_RATE_HZ)
        last = min(response.playhead.sent, at + int(MAX_LEAD_S * OUTPUT_RATE_HZ))
        before = bytes(BYTES_PER_SAMPLE * max(0, -first))
        return before + response.played_audio(max(0, first), last)
