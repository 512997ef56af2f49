"""A call: the WebRTC connection of a client to a voice session.

The connection lasts as long as the session is attached to it: until the client closes it (then the
session ends), the client is lost (the session waits for another call), or the session ends.
"""

import asyncio
import logging
import math

from aiortc import (
    RTCConfiguration,
    RTCDataChannel,
    RTCIceServer,
    RTCPeerConnection,
    RTCRtpSender,
    RTCSessionDescription,
)
from aiortc.exceptions import InternalError, InvalidAccessError, InvalidStateError, OperationError

from fleet.config.schema import VoiceConfig
from fleet.core.errors import BadInput, NoWorker
from fleet.process.background import start
from web.realtime.protocol.client_events import Played
from web.realtime.session import Session
from web.realtime.transport.voice_socket import NORMAL_CLOSURE
from web.realtime.webrtc.offer import checked_offer, with_address
from web.realtime.webrtc.speech_in import DECODED_HZ, SpeechFormat, SpeechIn
from web.realtime.webrtc.speech_out import SpeechOut
from web.realtime.webrtc.writer import CHANNEL, WebRtcWriter

log = logging.getLogger("fleet.web")

GOING_AWAY = 1001
CONNECT_S = 20.0
"""Seconds after the answer within which the client must have opened the data channel."""
CLOSE_S = 2.0
"""Seconds for sending the last events before the server closes a call."""
MAX_INPUT_BYTES = 4 * 1024 * 1024
"""Limit of the input that waits for the session, such as 43 s of audio at 48 kHz. A call with more
ends.
"""
QUIET_S = 0.2
"""Seconds without audio after which the client counts as silent: a muted microphone may send
nothing, and a turn ends by silence.
"""
WATCH_S = 0.1
"""Seconds between two looks at what has arrived."""
WINDOW = "_advertised_rwnd"
"""Attribute of aiortc's transport of messages: the bytes that the client may still send before a
message is complete. A client that sends more is not stopped, and the number becomes negative.
"""
_UNREADABLE = (
    ValueError,
    LookupError,
    AttributeError,
    TypeError,
    AssertionError,
    InternalError,
    InvalidAccessError,
    InvalidStateError,
    OperationError,
)
"""What aiortc raises for an offer that it cannot read."""


class WebRtcCall:
    def __init__(self, voice: VoiceConfig, *, fleet: bool) -> None:
        """Create a call without a session. If `fleet` is True, Fleet's extensions (events
        `fleet.*`) are sent too.
        """
        stun = voice.webrtc_stun
        # An empty list: with None, aiortc asks a public server for the gateway's address.
        servers = [RTCIceServer(f"stun:{stun}")] if stun is not None else []
        self._peer = RTCPeerConnection(RTCConfiguration(iceServers=servers))
        self._address = voice.webrtc_address
        self.writer = WebRtcWriter(self._on_played, self.close, fleet=fleet)
        self._speech_in = SpeechIn(self._put)
        self._speech_format = SpeechFormat()
        self._inbox: asyncio.Queue[str | bytes] = asyncio.Queue()
        self._inbox_bytes = 0
        self._session: Session | None = None
        self._heard_at = 0.0
        self._full_ms = math.inf
        """Length of the buffered input, in milliseconds, when audio was last refused; infinite
        while there is room.
        """
        self._is_lost = False
        self._is_opened = asyncio.Event()
        self._over = asyncio.Event()
        self._peer.on("datachannel", self._on_channel)
        self._peer.on("connectionstatechange", self._on_connection_state)

    async def answer(self, offer: str) -> str:
        """Return the answer to a client's offer. Raises: BadInput, UnsupportedValue, NoWorker."""
        offer = checked_offer(offer)
        transceiver = self._peer.addTransceiver(SpeechOut(self.writer.audio.next_frame))
        opus = RTCRtpSender.getCapabilities("audio").codecs
        transceiver.setCodecPreferences([one for one in opus if one.mimeType == "audio/opus"])
        self._speech_in.attach(transceiver.receiver)
        try:
            await self._peer.setRemoteDescription(RTCSessionDescription(sdp=offer, type="offer"))
            await self._peer.setLocalDescription()
        except _UNREADABLE as error:
            raise BadInput(
                f"sdp: the offer cannot be read: {str(error) or type(error).__name__}", param="sdp"
            ) from error
        transport = transceiver.receiver.transport.transport
        transport.on("statechange", lambda: self._on_ice_state(transport.state))
        if not transport.iceGatherer.getLocalCandidates():
            raise NoWorker("this machine has no network address that calls could reach")
        answer = self._peer.localDescription.sdp
        return with_address(answer, self._address) if self._address is not None else answer

    async def serve(self, session: Session, closing: asyncio.Event) -> bool:
        """Pass the client's input to its session until the call is over. Returns True if the call
        was closed properly, so that the session ends. Returns False if the client was lost, or if
        the gateway is stopping (`closing` is set): the session can then be continued.
        """
        self._session = session
        tasks = [
            start(self._read(session), "the reader of a call"),
            start(self._watch(), "the watch over a call's input"),
            start(self._lose_when(closing), "a call's wait for the gateway to stop"),
        ]
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._is_opened.wait()
            session.take_audio()
            await self._over.wait()
        except TimeoutError:
            log.info("a call was answered, and its client did not connect in %g s", CONNECT_S)
            self._is_lost = True
        finally:
            for task in tasks:
                task.cancel()
            await self._peer.close()
        return not self._is_lost

    async def discard(self) -> None:
        """Close a call that gets no session."""
        await self._peer.close()

    def close(self, code: int) -> None:
        """Close the call in the background, after the waiting events are sent. The session ends if
        `code` is `NORMAL_CLOSURE`; after any other code it may be continued.
        """
        self._is_lost |= code != NORMAL_CLOSURE
        start(self._close(), "the end of a call")

    async def _lose_when(self, closing: asyncio.Event) -> None:
        await closing.wait()
        self.close(GOING_AWAY)

    async def _close(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.writer.sent()
        except TimeoutError:
            log.debug("a client did not read the last events of its call")
        self._is_opened.set()
        self._over.set()

    # input

    def _on_channel(self, channel: RTCDataChannel) -> None:
        if channel.label != CHANNEL or self._is_opened.is_set():
            channel.close()
            return
        channel.on("message", self._on_message)
        channel.on("close", self._over.set)
        self.writer.open(channel)
        self._is_opened.set()

    def _on_message(self, message: str | bytes) -> None:
        if isinstance(message, str):
            self._put(message)
        elif self._session is not None:
            self._session.send_error(
                BadInput("binary messages are not read; send input_audio_buffer.append")
            )

    def _put(self, frame: str | bytes) -> None:
        """Store an event, or audio, until the session reads it. If too much is stored, the call
        ends.
        """
        if isinstance(frame, bytes):
            self._heard_at = asyncio.get_running_loop().time()
        if self._inbox_bytes + len(frame) > MAX_INPUT_BYTES:
            self._refuse_more()
            return
        self._inbox_bytes += len(frame)
        self._inbox.put_nowait(frame)

    async def _read(self, session: Session) -> None:
        while True:
            frame = await self._inbox.get()
            self._inbox_bytes -= len(frame)
            session.num_frames += 1
            if isinstance(frame, str):
                await session.receive(frame)
            elif session.settings.audio.input.format is not None:
                form = session.turns.buffer.form
                await self._receive_audio(session, self._speech_format.convert(frame, form))
            # Input that has arrived is read without a pause, so let other tasks run.
            await asyncio.sleep(0)

    async def _receive_audio(self, session: Session, audio: bytes) -> None:
        """Append audio to the session's input. While the input buffer is full, audio is dropped,
        with one error, since a microphone goes on sending.
        """
        buffer = session.turns.buffer
        if buffer.detector is None and buffer.retained_ms >= self._full_ms:
            return
        self._full_ms = math.inf if session.turns.has_room(audio) else buffer.retained_ms
        await session.receive_audio(audio)

    async def _watch(self) -> None:
        """Append silence to the input while no audio arrives, and end the call of a client that
        sends a message without end.
        """
        await self._is_opened.wait()
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(WATCH_S)
            if (heard_at := self._heard_at) and clock() - heard_at > QUIET_S:
                self._put(bytes(2 * int(DECODED_HZ * WATCH_S)))
                self._heard_at = heard_at
            if getattr(self._peer.sctp, WINDOW) < 0:
                self._refuse_more()

    def _refuse_more(self) -> None:
        log.info("a call ends: its client sends more than is read")
        self.writer.close(1009, "too much was sent at once")

    # output

    def _on_played(self, response_id: str, samples: int, underruns: int) -> None:
        if self._session is not None:
            self._session.record_playback(
                Played(
                    type="fleet.played",
                    response_id=response_id,
                    samples=samples,
                    underruns=underruns,
                )
            )

    # connection

    def _on_ice_state(self, state: str) -> None:
        self._is_lost |= state == "failed"

    def _on_connection_state(self) -> None:
        if self._peer.connectionState in ("failed", "closed"):
            self._is_lost |= self._peer.connectionState == "failed"
            self._over.set()
