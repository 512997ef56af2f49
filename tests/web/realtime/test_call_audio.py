"""Audio of calls: order of packets, queue of what is played, and Opus in both directions."""

from itertools import pairwise

import numpy as np
import pytest
from aiortc.rtp import RtpPacket
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.web.fake_client import RATE_HZ, sine
from web.realtime.audio.formats import AudioFormat, PcmFormat, PcmuFormat
from web.realtime.protocol.server_events import ServerEvent
from web.realtime.webrtc.offer import checked_offer, with_address
from web.realtime.webrtc.outgoing import FRAME_BYTES, FRAME_SAMPLES, OutgoingAudio
from web.realtime.webrtc.packet_order import MAX_LOST, MAX_WAITING, PacketOrder
from web.realtime.webrtc.speech_in import SpeechFormat, SpeechIn
from web.realtime.webrtc.speech_out import SILENCE, OpusEncoder


def passed(order: PacketOrder, number: int) -> list[int]:
    """Add a packet, and return the numbers of those that are passed on."""
    ready = order.add(number % 65_536, str(number).encode())
    return [int(one) for one in ready if one is not None]


@given(
    first=st.integers(0, 65_535),
    delays=st.lists(st.one_of(st.none(), st.integers(0, MAX_WAITING - 1)), max_size=200),
)
def test_packets_leave_in_order_without_waiting_for_more_than_three_later_ones(
    first: int, delays: list[int | None]
) -> None:
    """`delays`: number of places by which each packet is late; None for a lost packet."""
    arrivals = [
        (number + delay, number)
        for number, delay in enumerate(delays, first + 1)
        if delay is not None
    ]
    order, arrived = PacketOrder(), [first]
    kept = passed(order, first)
    for _, number in sorted(arrivals):
        arrived.append(number)
        kept += passed(order, number)
        assert sum(number > kept[-1] for number in arrived) <= MAX_WAITING
    assert all(before < after for before, after in pairwise(kept)) and set(kept) <= set(arrived)
    if None not in delays:
        assert kept == list(range(first, first + len(delays) + 1)), "none counts as lost"


@pytest.mark.parametrize("num_lost", [1, MAX_LOST, MAX_LOST + 3])
def test_lost_packets_are_replaced_up_to_a_limit(num_lost: int) -> None:
    order = PacketOrder()
    order.add(65_530, b"first")
    later = [(65_531 + num_lost + at) % 65_536 for at in range(MAX_WAITING + 1)]
    assert [order.add(number, b"later") for number in later[:-1]] == [[]] * MAX_WAITING
    ready = order.add(later[-1], b"later")
    assert ready == [None] * min(num_lost, MAX_LOST) + [b"later"] * len(later)
    assert order.add(later[0], b"later") == [], "a doubled packet is dropped"
    assert order.add((later[-1] + 10_000) % 65_536, b"new") == [b"new"], "the sender began anew"


class Playing:
    """A queue with the events and positions that it reported."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.played: list[tuple[str, int, int]] = []
        self.audio = OutgoingAudio(self._on_event, lambda *report: self.played.append(report))

    def _on_event(self, event: ServerEvent) -> None:
        kind = str(event.__struct_config__.tag).removeprefix("output_audio_buffer.")
        self.events.append((kind, getattr(event, "response_id", "")))

    def frames(self, count: int) -> list[bytes | None]:
        return [self.audio.next_frame() for _ in range(count)]


@given(cuts=st.lists(st.integers(1, 4000), min_size=1, max_size=6))
def test_all_audio_of_a_response_is_played_once_between_its_events(cuts: list[int]) -> None:
    playing, pcm = Playing(), sine(sum(cuts)).tobytes()
    position = 0
    for cut in cuts:
        playing.audio.add("a", position, pcm[2 * position : 2 * (position + cut)])
        position += cut
    playing.audio.finish("a")
    playing.audio.add("b", 0, bytes(FRAME_BYTES))
    num_frames = -(-len(pcm) // FRAME_BYTES)
    frames = playing.frames(num_frames)
    assert b"".join(frame or b"" for frame in frames) == pcm.ljust(num_frames * FRAME_BYTES, b"\0")
    assert playing.frames(2) == [bytes(FRAME_BYTES), None]
    assert playing.events == [("started", "a"), ("stopped", "a"), ("started", "b")]
    assert ("a", position, 0) in playing.played


def test_audio_that_is_late_is_an_interruption_and_plays_on() -> None:
    playing = Playing()
    playing.audio.add("a", 100, bytes(FRAME_BYTES))
    assert playing.frames(3) == [bytes(FRAME_BYTES), None, None]
    playing.audio.add("a", 100 + FRAME_SAMPLES, bytes(FRAME_BYTES))
    assert playing.frames(1) == [bytes(FRAME_BYTES)]
    assert playing.played == [("a", 100, 0), ("a", 100 + FRAME_SAMPLES, 1)]
    assert playing.events == [("started", "a")]


def test_cleared_audio_is_never_played() -> None:
    playing = Playing()
    playing.audio.clear()
    playing.audio.add("a", 0, bytes(10 * FRAME_BYTES))
    playing.audio.finish("a")
    playing.frames(2)
    playing.audio.clear()
    assert playing.frames(2) == [None, None]
    assert playing.events == [("started", "a"), ("cleared", "a")]


def loudness(samples: NDArray[np.int16]) -> float:
    return float(np.sqrt(np.mean(samples.astype(np.float64) ** 2)))


FORMATS: list[AudioFormat] = [
    *(PcmFormat(rate=rate_hz) for rate_hz in (8_000, 24_000, 48_000)),
    PcmuFormat(),
]


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_encoded_speech_is_decoded_with_its_length_level_and_pitch(form: AudioFormat) -> None:
    encoder, heard, rate_hz = OpusEncoder(), bytearray(), form.rate
    speech = SpeechFormat()
    speech_in = SpeechIn(lambda pcm: heard.extend(speech.convert(pcm, form)))
    pcm = sine(RATE_HZ).tobytes()
    frames = [pcm[at : at + FRAME_BYTES] for at in range(0, len(pcm), FRAME_BYTES)]
    packets = [encoder.encode(frame) for frame in (*frames, None, None, None)]
    assert packets[-1] == SILENCE != packets[-2]
    for number, packet in enumerate(packets):
        if number % 17 != 5:  # the others are lost
            sent = RtpPacket(sequence_number=number)
            sent.payload = packet
            speech_in.add(sent)
    samples = np.frombuffer(form.to_pcm(bytes(heard)), "<i2")
    assert len(samples) == pytest.approx(rate_hz * 1.06, rel=0.03)
    middle = samples[rate_hz // 4 : rate_hz * 3 // 4]
    assert loudness(middle) == pytest.approx(loudness(sine(RATE_HZ)), rel=0.2)
    spectrum = np.abs(np.fft.rfft(middle.astype(np.float64)))
    assert abs(int(spectrum.argmax()) * 2 - 440) <= 4


@pytest.mark.parametrize("seed", range(3))
def test_speech_with_two_percent_of_loss_never_lags_by_200_ms(seed: int) -> None:
    heard = bytearray()
    speech_in, num_frames, frame_bytes = SpeechIn(heard.extend), 4000, 960 * 2
    is_lost = np.random.default_rng(seed).random(num_frames) < 0.02
    is_lost[[0, -1]] = False
    assert is_lost.sum() > num_frames // 100
    for number in np.flatnonzero(~is_lost):
        packet = RtpPacket(sequence_number=int(number))
        packet.payload = SILENCE
        speech_in.add(packet)
        assert (number + 1) * frame_bytes - len(heard) < frame_bytes * 10
    assert len(heard) >= (num_frames - MAX_WAITING - MAX_LOST) * frame_bytes, "times remain true"


def test_broken_packets_are_replaced_and_empty_ones_ignored() -> None:
    heard = bytearray()
    speech_in = SpeechIn(heard.extend)
    for number, payload in enumerate((SILENCE, b"", b"\xff" * 40, SILENCE)):
        packet = RtpPacket(sequence_number=number)
        packet.payload = payload
        speech_in.add(packet)
    assert len(heard) == 3 * 960 * 2


HOST = "a=candidate:1 1 udp 2130706431 {} 50000 typ host"


def test_hidden_addresses_of_an_offer_are_not_looked_up() -> None:
    hidden, open_one = HOST.format("4f-2c.local"), HOST.format("192.0.2.1")
    head = "v=0\na=fingerprint:sha-256 00\nm=audio 9 UDP/TLS/RTP/SAVPF 111"
    rest = ["a=rtpmap:111 opus/48000/2", hidden, open_one, "a=end-of-candidates"]
    lines = checked_offer("\n".join([head, *rest, "m=application 9 X y"])).split("\r\n")
    assert open_one in lines and hidden not in lines and "a=end-of-candidates" not in lines


def test_public_address_joins_each_candidate_of_its_family() -> None:
    answer = "\r\n".join([HOST.format("10.0.0.5"), HOST.format("fd00::2")])
    lines = with_address(answer, "203.0.113.7").split("\r\n")
    assert lines == [
        HOST.format("10.0.0.5"),
        HOST.format("203.0.113.7").replace(":1 1", ":1p 1"),
        HOST.format("fd00::2"),
    ]
