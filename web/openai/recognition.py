"""Recognition of a recording: the request of a transcription, and its transcript. Knows no HTTP.

Models answer silence and noise with invented words. So audio without speech has an empty
transcript, for which no request is submitted.
"""

from collections.abc import AsyncIterator, Iterable

import numpy as np

from fleet.core.ids import RequestId, new_request_id
from fleet.core.request import RequestSpec
from fleet.processing import AudioPart, Message, RecognitionOptions, Recording, TextPart
from fleet.processing.base import AudioSource
from fleet.processing.speech_presence import has_speech
from fleet.processing.timed_text import WindowReport
from web.gateway.answer import AnswerStream, HeardPiece, Piece, TextPiece
from web.gateway.gateway import Gateway
from web.gateway.prepared_chat import PreparedChat
from web.gateway.stored_body import stored_body
from web.http.offload import prepare_in_thread
from web.schema.chat import ChatOptions

NO_OPTIONS = RecognitionOptions()


async def transcribe(
    gateway: Gateway,
    recording: Recording,
    hearing: RecognitionOptions = NO_OPTIONS,
    store: bool | None = None,
) -> str:
    """Return the transcript of a recording; "" if the recording holds no speech. If the caller is
    cancelled, the request is aborted. `store`: False keeps the answer out of training; None is the
    default of the API.

    Raises: FleetError; BadInput if the audio is too short or too long.
    """
    chat = await prepare_transcription(gateway, recording, new_request_id(), hearing, store)
    if not await is_spoken(chat):
        return ""
    active = await gateway.submit_prepared(chat)
    async with active.answer as answer:
        return "".join([text async for text in texts_of(answer)])


async def prepare_transcription(
    gateway: Gateway,
    audio: AudioSource,
    request_id: RequestId,
    hearing: RecognitionOptions = NO_OPTIONS,
    store: bool | None = None,
) -> PreparedChat:
    """Prepare the request of a transcription: for the stage that recognises audio, if the graph has
    such a stage, otherwise as a chat. A chat ignores the prompt and times in `hearing`, and is
    sampled greedily unless `hearing` has a temperature.

    Raises: the errors of `Gateway.prepare_chat`.
    """
    if (heard := gateway.edges.heard) is not None:
        part = AudioPart(data=audio, where="file")
        options = ChatOptions(model=gateway.model, store=store)
        return await gateway.prepare_chat(
            options,
            (Message(role="user", content=(part,)),),
            request_id,
            stored=stored_body(options, ()),
            kind="transcription",
            where="file",
            outputs=(heard,),
            hearing=hearing,
        )
    asked = gateway.frontend.transcription_prompt(hearing.language)
    prompt = TextPart(text=asked, where="prompt")
    messages = (Message(role="user", content=(AudioPart(data=audio, where="file"), prompt)),)
    temperature = hearing.temperature or 0.0
    options = ChatOptions(model=gateway.model, temperature=temperature, store=store)
    stored = stored_body(options, (Message(role="user", content=prompt),))
    return await gateway.prepare_chat(options, messages, request_id, stored=stored, where="file")


async def is_spoken(chat: PreparedChat) -> bool:
    """Return True if the audio of a prepared transcription holds speech."""
    (clip,) = chat.spec.audio
    samples = np.frombuffer(chat.blob or b"", np.float32)
    return await prepare_in_thread(False, has_speech, samples, clip.rate_hz)


async def texts_of(answer: AnswerStream) -> AsyncIterator[str]:
    """Yield the text of a transcript as it arrives."""
    async for piece in answer.pieces():
        if text := text_of(piece):
            yield text


def text_of(piece: Piece) -> str:
    """Return the text of a transcript in a piece of an answer; "" for a piece without text."""
    return piece.text if isinstance(piece, TextPiece | HeardPiece) else ""


def reports_of(pieces: Iterable[Piece]) -> list[WindowReport]:
    """Return the reports in the pieces of an answer: segments and words with their times."""
    heard = (piece for piece in pieces if isinstance(piece, HeardPiece))
    return [report for piece in heard for report in piece.reports]


def duration_s(spec: RequestSpec) -> float:
    """Return the duration of a request's audio in seconds."""
    return round(sum(clip.num_samples / clip.rate_hz for clip in spec.audio), 3)
