"""One request's story with its words and its sound: what the log holds, read as the gateway reads an answer. Knows no stage."""

import asyncio
from collections.abc import Sequence

import numpy as np

from fleet.core.chunk import Chunk
from fleet.core.errors import NotFound, quoted
from fleet.core.ids import RequestId
from fleet.core.request_trace import RequestTrace
from web.gateway.gateway import Gateway
from web.openai.audio_encoder import encode_whole


class RequestDetail(RequestTrace, frozen=True, kw_only=True):
    """A story and its words. `audio_samples`: of the answer's sound so far, at `audio_rate_hz` (0: it has none)."""

    object: str = "fleet.request"
    prompt: str = ""
    answer: str = ""
    audio_samples: int = 0
    audio_rate_hz: int = 0


async def read_told(gateway: Gateway, request: RequestId) -> RequestDetail:
    """Raises: NotFound, RedisUnreachable."""
    story = await gateway.client.telemetry.trace(request)
    if story is None:
        raise no_request(request)
    ids = _joined(await gateway.client.telemetry.edge_log(request, gateway.edges.text), "ids", "<i4")
    sound = next((edge for edge in story.edges if edge.name == gateway.edges.audio), None)
    fields = {name: getattr(story, name) for name in RequestTrace.__struct_fields__}
    return RequestDetail(
        **fields,
        prompt=_text(gateway, story.prompt_ids),
        answer=_text(gateway, tuple(int(token) for token in ids)),
        audio_samples=sound.rows if sound is not None else 0,
        audio_rate_hz=gateway.frontend.sample_rate_hz if sound is not None else 0,
    )


async def wav_of(gateway: Gateway, request: RequestId) -> bytes:
    """The answer's sound as far as it is made. Raises: NotFound where there is none, or it is not kept any more."""
    edge = gateway.edges.audio
    samples = _joined(await gateway.client.telemetry.edge_log(request, edge), "pcm", "<i2") if edge is not None else _NOTHING
    if not len(samples):
        if await gateway.client.telemetry.trace(request) is None:
            raise no_request(request)
        raise NotFound(
            f"request {request} has no sound, or it is no longer kept: that is so a minute after its end", param="request_id"
        )
    return await asyncio.to_thread(encode_whole, samples.tobytes(), gateway.frontend.sample_rate_hz, "wav")


async def quiet_logs(gateway: Gateway, story: RequestTrace) -> dict[str, Sequence[Chunk]]:
    """Every edge's chunks but sound's, since those come with all of the sound."""
    quiet = [edge.name for edge in story.edges if edge.name != gateway.edges.audio]
    return {name: await gateway.client.telemetry.edge_log(story.id, name) for name in quiet}


def no_request(request: str) -> NotFound:
    return NotFound(f"no request {quoted(request)}; it never was, or its retention time is over", param="request_id")


_NOTHING = np.empty(0, "<i2")


def _text(gateway: Gateway, ids: tuple[int, ...]) -> str:
    detokenizer = gateway.frontend.detokenizer()
    return detokenizer.add(ids) + detokenizer.finish()


def _joined(chunks: Sequence[Chunk], name: str, dtype: str) -> np.ndarray:
    """One inline tensor of every chunk, flat."""
    found = [tensor.data for chunk in chunks if (tensor := chunk.tensors.get(name)) is not None and tensor.data is not None]
    return np.frombuffer(b"".join(found), dtype)
