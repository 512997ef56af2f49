"""The `tts` stage of the graph `cascade`: text of an answer in, PCM16 in pieces out."""

from collections.abc import Iterator, Sequence

import numpy as np

from fleet.core.errors import ConfigError
from fleet.core.ids import DECODE, EdgeName, Walk
from fleet.core.request import RequestSpec, Sampling
from fleet.engine import voice
from fleet.engine.base import Arrays, EngineInput, EngineOutput, EngineRequest
from fleet.engine.voice import VoiceEngine
from fleet.graphs.cascade import AUDIO
from fleet.models.voices.load import load_voice
from fleet.stages.base import NO_OUTPUT, BuiltStage, EdgeItem, LoggedOutput, TaskAdapter
from fleet.stages.cascade.narration import ClauseSpeaker
from fleet.stages.options import BuildOptions

RATE_HZ = 24_000
MAX_PIECE_SAMPLES = RATE_HZ // 2


def build(options: BuildOptions) -> BuiltStage:
    """Build the stage. Raises: ConfigError if the checkpoint's voice is missing or unusable."""
    model = load_voice(options.checkpoint)
    if model.sample_rate_hz != RATE_HZ:
        raise ConfigError(
            f"checkpoint {options.checkpoint}: its voice speaks at {model.sample_rate_hz} Hz; the "
            f"edge audio carries {RATE_HZ} Hz",
            param="checkpoint",
        )
    options.progress(1.0)
    speaker = ClauseSpeaker(model)
    return BuiltStage(
        engine=VoiceEngine(speaker), adapter=lambda spec, _blob: VoiceTask(spec, options, speaker)
    )


class VoiceTask(TaskAdapter):
    """Adapter of a request's task: speaks the text in the request, or else the answer's text as it
    arrives, and cuts the speech into pieces of at most half a second.
    """

    def __init__(self, spec: RequestSpec, options: BuildOptions, speaker: ClauseSpeaker) -> None:
        self._spec = spec
        self._stage = options.stage
        self._speaker = speaker
        self._num_samples = 0

    def open(self, logged: LoggedOutput = NO_OUTPUT) -> tuple[EngineRequest, Sequence[EngineInput]]:
        """Return the engine request, and the text if the request has it. Audio that is already
        logged becomes the engine's history. Raises: BadInput for an unknown voice or speed.
        """
        self._speaker.check(self._spec.params)
        pcm = logged.get((AUDIO, DECODE), {}).get("pcm")
        request = EngineRequest(
            request_id=self._spec.id,
            sampling=self._spec.sampling.get(self._stage, Sampling()),
            params=self._spec.params,
            history={} if pcm is None else {voice.WAVE: pcm},
        )
        given = self._spec.speech_text.encode()
        return request, [_text_input(np.frombuffer(given, np.uint8), final=True)] if given else ()

    def consume(
        self, edge: EdgeName, walk: Walk, arrays: Arrays, *, final: bool
    ) -> Sequence[EngineInput]:
        return (_text_input(arrays.get("text", np.zeros(0, np.uint8)), final=final),)

    def produce(self, output: EngineOutput) -> Sequence[EdgeItem]:
        if output.error is not None:
            return ()
        pieces: list[Arrays] = [{}]
        if output.arrays:
            pieces = list(pieces_of(output.arrays, self._num_samples))
            self._num_samples += len(output.arrays[voice.WAVE])
        return [
            EdgeItem(
                edge=AUDIO,
                walk=DECODE,
                arrays=arrays,
                final=output.final and number == len(pieces),
            )
            for number, arrays in enumerate(pieces, 1)
        ]


def _text_input(text: np.ndarray, *, final: bool) -> EngineInput:
    return EngineInput(walk=DECODE, arrays={voice.TEXT: text}, final=final)


def pieces_of(arrays: Arrays, begin: int) -> Iterator[Arrays]:
    """Yield the pieces of one engine output, each with the words that end in it. `begin`: number of
    samples of the answer before this output.
    """
    wave, ends = arrays[voice.WAVE], arrays[voice.WORD_ENDS]
    words = arrays[voice.WORDS].tobytes().split(b"\0")[:-1]
    first = 0
    for start in range(0, max(1, len(wave)), MAX_PIECE_SAMPLES):
        stop = start + MAX_PIECE_SAMPLES
        ended = int(np.searchsorted(ends, begin + stop, side="right"))
        last = ended if stop < len(wave) else len(words)
        text = b"".join(word + b"\0" for word in words[first:last])
        yield {
            "pcm": wave[start:stop],
            "word_ends": ends[first:last],
            "words": np.frombuffer(text, np.uint8),
        }
        first = last
