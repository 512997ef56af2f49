"""The recogniser's stage of the graph `cascade`: the prompt's audio clips in, their transcripts
out, one item per window of speech.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import soxr
from numpy.typing import NDArray

from fleet.core.ids import DECODE
from fleet.core.request import RequestSpec, Sampling
from fleet.engine.base import TOKEN, EngineInput, EngineOutput, EngineRequest
from fleet.engine.recognizer import CLIP, DETAILS, LANGUAGE, PROMPT, SAMPLES, RecognizerEngine
from fleet.engine.torch.build import open_device
from fleet.graphs.cascade import (
    ASR,
    CASCADE,
    HEARD,
    LANGUAGE_PARAM,
    PROMPT_PARAM,
    TEMPERATURE_PARAM,
    TIMES_PARAM,
    TRANSCRIPT,
)
from fleet.models.whisper.on_ctranslate2 import COMPUTE_TYPES, ConvertedRecognizer
from fleet.models.whisper.recognizer import load_recognizer
from fleet.models.whisper.transcriber import SHORT_WINDOWS_S, WhisperTranscriber
from fleet.processing.speech_presence import has_speech
from fleet.processing.timed_text import encode_report
from fleet.processing.tokenizer import load_tokenizer
from fleet.processing.voice_activity import model as load_voice_activity
from fleet.stages.base import NO_OUTPUT, BuiltStage, EdgeItem, LoggedOutput, TaskAdapter
from fleet.stages.cascade.window_report import WindowReader
from fleet.stages.options import BuildOptions
from fleet.stages.prompt_audio import cut_clips
from fleet.stages.sampling import sampling_of

Samples = NDArray[np.float32]
PARAMS = {LANGUAGE_PARAM: LANGUAGE, PROMPT_PARAM: PROMPT, TIMES_PARAM: DETAILS}
"""Parameters of a request, and the engine's parameters of the same meaning."""
AnyModel = WhisperTranscriber[Any]
CTRANSLATE2 = "ctranslate2"
WINDOWS, COMPUTE_TYPE = "short_windows", "compute_type"
INCOMPLETE = "\ufffd"


def build(options: BuildOptions) -> BuiltStage:
    """Build the stage. Setting `extra.short_windows` = false recognises every clip in windows of 30
    s, as the published model does. Raises: ConfigError if the checkpoint or an option is unusable.
    """
    model, names, one_by_one = (
        _on_ctranslate2(options) if options.engine == CTRANSLATE2 else _on_torch(options)
    )
    load_voice_activity()
    engine = RecognizerEngine(
        model,
        max_batch=options.own.max_batch,
        one_by_one=one_by_one,
        has_speech=lambda samples: has_speech(samples, model.rate_hz),
    )
    tokenizer = load_tokenizer(options.checkpoint)
    vocabulary = Vocabulary(
        decode=tokenizer.decode,
        end=model.end_token,
        rate_hz=model.rate_hz,
        language_of=model.language_of,
    )
    return BuiltStage(
        engine=engine,
        adapter=lambda spec, blob: RecognizerTask(spec, blob, vocabulary),
        weight_names=names,
    )


def _on_torch(options: BuildOptions) -> tuple[AnyModel, tuple[str, ...], bool]:
    if COMPUTE_TYPE in options.own.extra:
        raise options.refusal(
            f"extra.{COMPUTE_TYPE}", "only engine ctranslate2 reads it; set dtype for torch"
        )
    where = open_device(
        device=options.device,
        dtype=options.dtype,
        numerics=options.config.numerics,
        threads=options.own.threads,
    )
    model, names = load_recognizer(
        options.checkpoint,
        where,
        window_sizes_s=_window_sizes_s(options),
        progress=options.progress,
    )
    return model, names, where.tiled


def _on_ctranslate2(options: BuildOptions) -> tuple[AnyModel, tuple[str, ...], bool]:
    if options.device_kind != "cpu":
        raise options.refusal("device", f"ctranslate2 computes on cpu, not on {options.device}")
    compute_type = options.own.extra.get(COMPUTE_TYPE, COMPUTE_TYPES[0])
    if compute_type not in COMPUTE_TYPES:
        cause = f"{compute_type!r} is none of {', '.join(COMPUTE_TYPES)}"
        raise options.refusal(f"extra.{COMPUTE_TYPE}", cause)
    model = ConvertedRecognizer(
        options.checkpoint,
        threads=options.own.threads or 1,
        compute_type=str(compute_type),
        window_sizes_s=_window_sizes_s(options),
    )
    return model, (), False


def _window_sizes_s(options: BuildOptions) -> Sequence[int]:
    short = options.own.extra.get(WINDOWS, True)
    if not isinstance(short, bool):
        raise options.refusal(f"extra.{WINDOWS}", f"{short!r} is neither true nor false")
    return SHORT_WINDOWS_S if short else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What an adapter knows of the recogniser. `decode`: converts tokens to text. `end`: first
    token id that is not text. `rate_hz`: sample rate of the model's input. `language_of`: returns
    the language that the tokens of a clip's first window name, "" if they name none.
    """

    decode: Callable[[Sequence[int]], str]
    end: int
    rate_hz: int
    language_of: Callable[[Sequence[int]], str]

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, complete characters only."""
        return self.decode([token for token in ids if token < self.end]).rstrip(INCOMPLETE)


class RecognizerTask(TaskAdapter):
    """Adapter of a request's task. Every window of speech becomes one item: its text, and the
    tokens from which a later owner continues. Edges that the request does not use get no items.

    `blob`: samples of the prompt's audio, float32 mono.
    """

    def __init__(self, spec: RequestSpec, blob: bytes | None, vocabulary: Vocabulary) -> None:
        self._spec = spec
        self._blob = blob
        self._vocabulary = vocabulary
        self._sampling = recognition_sampling(spec)
        self._languages: dict[int, str] = {}
        self._edges = [edge.name for edge in CASCADE.edges_of(spec) if edge.source == ASR]
        self._begun: set[int] = set()
        """Numbers of the clips that have text."""

    def open(self, logged: LoggedOutput = NO_OUTPUT) -> tuple[EngineRequest, Sequence[EngineInput]]:
        """Return the engine request, and one input per clip. Raises: BadInput if the blob has fewer
        samples than the request's clips.
        """
        logs = [
            logged[edge, DECODE]["ids"]
            for edge in (TRANSCRIPT, HEARD)
            if "ids" in logged.get((edge, DECODE), {})
        ]
        request = EngineRequest(
            request_id=self._spec.id,
            sampling=self._sampling,
            params={
                PARAMS[name]: value for name, value in self._spec.params.items() if name in PARAMS
            },
            history={TOKEN: max(logs, key=len)} if logs else {},
        )
        cut = zip(cut_clips(self._spec, self._blob), self._spec.audio, strict=True)
        rate_hz = self._vocabulary.rate_hz
        clips = [_resampled(samples, clip.rate_hz, rate_hz) for samples, clip in cut]
        if not clips:
            return request, [EngineInput(walk=DECODE, final=True)]
        return request, [
            EngineInput(walk=DECODE, arrays={SAMPLES: clip}, final=number == len(clips) - 1)
            for number, clip in enumerate(clips)
        ]

    def produce(self, output: EngineOutput) -> Sequence[EdgeItem]:
        if output.error is not None:
            return ()
        arrays = self._piece(output) if output.arrays else {}
        return [
            EdgeItem(edge=edge, walk=DECODE, arrays=arrays, final=output.final)
            for edge in self._edges
        ]

    def _piece(self, output: EngineOutput) -> dict[str, np.ndarray]:
        ids, clip = output.arrays[TOKEN], int(output.arrays[CLIP][0])
        text = self._vocabulary.text_of(ids.tolist())
        if clip not in self._begun:
            text = text.lstrip()
        if text:
            self._begun.add(clip)
        raw = np.frombuffer(text.encode(), np.uint8)
        return {
            "clip": output.arrays[CLIP],
            "sizes": np.array([len(raw)], np.int32),
            "text": raw,
            "ids": ids,
            **self._report(output, clip),
        }

    def _report(self, output: EngineOutput, clip: int) -> dict[str, np.ndarray]:
        """Return the report of a window as an array; no array if the request asks for no times. The
        report of a window that an earlier owner recognised has no segments, since that owner has
        sent them.
        """
        if TIMES_PARAM not in self._spec.params:
            return {}
        known = self._vocabulary
        named = known.language_of(output.arrays[TOKEN].tolist())
        given = self._spec.params.get(LANGUAGE_PARAM, "")
        language = given or self._languages.get(clip) or named
        self._languages[clip] = language
        reader = WindowReader(
            decode=known.decode,
            end=known.end,
            rate_hz=known.rate_hz,
            temperature=self._sampling.temperature,
        )
        line = encode_report(reader.report(output.arrays, language))
        return {"report": np.frombuffer(line, np.uint8)}


def recognition_sampling(spec: RequestSpec) -> Sampling:
    """Return the sampling of a request's transcripts. A temperature that the request gives for
    recognition replaces the temperature of the stage's sampling.
    """
    given = spec.params.get(TEMPERATURE_PARAM)
    sampling = sampling_of(spec, CASCADE, ASR)
    if given is None:
        return sampling
    asked = msgspec.structs.replace(sampling, temperature=float(given))
    return sampling_of(msgspec.structs.replace(spec, sampling={ASR: asked}), CASCADE, ASR)


def _resampled(samples: Samples, rate_hz: int, wanted_hz: int) -> Samples:
    if rate_hz == wanted_hz:
        return samples
    return soxr.resample(samples, rate_hz, wanted_hz).astype(np.float32, copy=False)
