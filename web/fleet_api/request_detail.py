"""Details of a request: its trace, the texts of prompt and answer, and the audio, read from the
logs of its edges. Knows no stage.
"""

import asyncio
import io
from collections.abc import Sequence

import msgspec
import numpy as np
import soundfile

from fleet.core.chunk import Chunk
from fleet.core.errors import NotFound, quoted
from fleet.core.ids import RequestId, begun_at
from fleet.core.trace_context import trace_id_of
from fleet.processing.prompt import audio_mark
from fleet.telemetry.trace import RequestTrace
from fleet.telemetry.views import LogLine, LogQuery
from web.gateway.answer import transcripts_of
from web.gateway.gateway import Gateway
from web.http.callers import current_caller
from web.openai.audio_encoder import encode_whole

CLOCKS_US, WRITTEN_WITHIN_US = 60_000_000, 120_000_000
"""Largest expected difference between the clocks of a gateway and Redis, and longest expected time
from a refusal to its entry in the journal.
"""


class RequestDetail(RequestTrace, frozen=True, kw_only=True):
    """A request's trace with the texts of its prompt and answer; in the prompt `[audio]` stands for
    each audio clip, or `[audio: ...]` with its transcript as far as it is known.

    `audio_samples` is the number of samples produced so far, at `audio_rate_hz` (0 without audio).
    `heard` has the transcripts of the prompt's clips as far as they are known. `trace_id`: id of
    the trace as which the answer is exported to a collector.
    """

    object: str = "fleet.request"
    prompt: str = ""
    answer: str = ""
    audio_samples: int = 0
    audio_rate_hz: int = 0
    heard: tuple[str, ...] = ()
    trace_id: str = ""


class AnswerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of an answer. `logs`: chunks by edge, except for the audio edge; empty if the
    answer's texts may not be kept. `lines`: log lines that name the request, oldest first.
    """

    detail: RequestDetail
    logs: dict[str, tuple[Chunk, ...]] = {}
    lines: tuple[LogLine, ...] = ()


async def read_request_detail(gateway: Gateway, request: RequestId) -> RequestDetail:
    """Return the details of a request, as they are stored or as they were kept. Raises: NotFound,
    RedisUnreachable.
    """
    trace = await gateway.client.telemetry.trace(request)
    if trace is None:
        return (await read_record(gateway, request)).detail
    ids = _joined(
        await gateway.client.telemetry.edge_log(request, gateway.edges.text), "ids", "<i4"
    )
    heard = await _heard(gateway, trace)
    audio = next((edge for edge in trace.edges if edge.name == gateway.edges.audio), None)
    fields = {name: getattr(trace, name) for name in RequestTrace.__struct_fields__}
    return RequestDetail(
        **fields,
        prompt=gateway.frontend.prompt_text(trace.prompt_ids, heard)
        or "\n".join(map(audio_mark, heard)),  # a transcription's prompt is its audio
        answer=_text(gateway, tuple(int(token) for token in ids)),
        audio_samples=audio.rows if audio is not None else 0,
        audio_rate_hz=gateway.frontend.sample_rate_hz if audio is not None else 0,
        heard=tuple(heard),
        trace_id=trace_id_of(trace.id, trace.traceparent),
    )


async def read_record(gateway: Gateway, request: RequestId) -> AnswerRecord:
    """Return the record of a kept answer. Raises: NotFound if the answer is not kept, with the
    reason if the journal has a refusal of the request; RedisUnreachable.
    """
    kept = await gateway.history.read(request)
    if kept is None:
        raise await _refused(gateway, request) or request_not_found(request)
    try:
        return msgspec.msgpack.decode(kept.record, type=AnswerRecord)
    except msgspec.DecodeError:
        raise NotFound(
            f"request {quoted(request)} was kept by another version of Fleet, which this one "
            "cannot read",
            param="request_id",
        ) from None


async def read_lines(gateway: Gateway, request: RequestId, limit: int) -> tuple[LogLine, ...]:
    """Return the last `limit` log lines that name a request, oldest first, as they are stored or as
    they were kept. Raises: RedisUnreachable.
    """
    page = await gateway.client.telemetry.logs(LogQuery(request=request), limit=limit)
    if page.lines or await gateway.history.read(request) is None:
        return tuple(reversed(page.lines))
    return (await read_record(gateway, request)).lines


async def has_sound(gateway: Gateway, request: RequestId) -> bool:
    """Return True while the audio of a request can be played. Raises: RedisUnreachable."""
    edge = gateway.edges.audio
    if edge is None:
        return False
    if await gateway.client.telemetry.has_edge_log(request, edge):
        return True
    return await gateway.history.has_sound(request)


async def pcm_of(gateway: Gateway, request: RequestId) -> bytes:
    """Return the audio that a request has produced so far, mono PCM16; b"" if there is none, or if
    it is no longer stored.
    """
    edge = gateway.edges.audio
    if edge is None:
        return b""
    return _joined(await gateway.client.telemetry.edge_log(request, edge), "pcm", "<i2").tobytes()


async def wav_of(gateway: Gateway, request: RequestId) -> bytes:
    """Return the audio that a request has produced so far, as a WAV file.

    Raises: NotFound if there is no audio, or it is no longer stored.
    """
    pcm = await pcm_of(gateway, request)
    if not pcm:
        kept = await gateway.history.read(request)
        if kept is not None and kept.sound:
            return await asyncio.to_thread(_as_wav, kept.sound)
        if kept is None and await gateway.client.telemetry.trace(request) is None:
            raise request_not_found(request)
        raise NotFound(
            f"request {request} has no audio, or it is no longer stored: audio is deleted a "
            "minute after the end, unless history.sound keeps it",
            param="request_id",
        )
    return await asyncio.to_thread(encode_whole, pcm, gateway.frontend.sample_rate_hz, "wav")


async def read_logs_without_audio(
    gateway: Gateway, trace: RequestTrace
) -> dict[str, Sequence[Chunk]]:
    """Return the stored chunks of every edge of a request, except for the audio edge, whose chunks
    are large.
    """
    names = [edge.name for edge in trace.edges if edge.name != gateway.edges.audio]
    logs: dict[str, Sequence[Chunk]] = {
        name: await gateway.client.telemetry.edge_log(trace.id, name) for name in names
    }
    if any(logs.values()) or not trace.ended_us:
        return logs
    kept = await gateway.history.read(trace.id)
    return {**(await read_record(gateway, trace.id)).logs} if kept is not None else logs


async def check_owner(gateway: Gateway, request: RequestId) -> None:
    """Check that the caller may end or take over a request: a caller with the scope `operate` any
    request, other callers only requests of their own key. An unknown request passes. Raises:
    NotFound for requests of other keys, as if these requests did not exist.
    """
    caller = current_caller()
    if caller.may("operate"):
        return
    trace = await gateway.client.telemetry.trace(request)
    if trace is not None and trace.key != caller.name:
        raise request_not_found(request)


def request_not_found(request: str) -> NotFound:
    return NotFound(
        f"no request {quoted(request)}; it never was, or its retention time is over",
        param="request_id",
    )


async def _refused(gateway: Gateway, request: RequestId) -> NotFound | None:
    """Return the error that gives the reason why a request was refused; None if the journal has no
    refusal of the request. Raises: RedisUnreachable.
    """
    begun_us = begun_at(request)
    if not begun_us:
        return None
    within_us = round(gateway.config.limits.max_wait_s * 1e6) + WRITTEN_WITHIN_US
    entries = await gateway.client.telemetry.journal(
        since_us=begun_us - CLOCKS_US, until_us=begun_us + within_us, what=("refused",)
    )
    entry = next((entry for entry in reversed(entries) if request in entry.requests), None)
    if entry is None:
        return None
    why = entry.message or entry.code
    return NotFound(f"request {request} was refused ({entry.code}): {why}", param="request_id")


def _as_wav(sound: bytes) -> bytes:
    samples, rate_hz = soundfile.read(io.BytesIO(sound), dtype="int16")
    return encode_whole(samples.tobytes(), rate_hz, "wav")


async def _heard(gateway: Gateway, trace: RequestTrace) -> list[str]:
    """Return the transcripts of the prompt's clips as far as they are known. If the client did not
    ask for transcripts, they are read from another edge of the stage that makes them.
    """
    wanted = gateway.edges.heard
    if wanted is None or not trace.audio:
        return []
    source = gateway.graph.edge(wanted).source
    names = [edge.name for edge in gateway.graph.edges if edge.source == source]
    for name in (edge.name for edge in trace.edges if edge.name in names):
        if chunks := await gateway.client.telemetry.edge_log(trace.id, name):
            return transcripts_of(chunks, len(trace.audio))
    return []


def _text(gateway: Gateway, ids: tuple[int, ...]) -> str:
    detokenizer = gateway.frontend.detokenizer()
    return detokenizer.add(ids) + detokenizer.finish()


def _joined(chunks: Sequence[Chunk], name: str, dtype: str) -> np.ndarray:
    """Concatenate the inline tensor `name` of all chunks into a flat array."""
    found = [
        tensor.data
        for chunk in chunks
        if (tensor := chunk.tensors.get(name)) is not None and tensor.data is not None
    ]
    return np.frombuffer(b"".join(found), dtype)
