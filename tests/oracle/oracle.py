"""The oracle: text, codes and audio of a greedy request by one `generate()` call of `transformers`.

Tests compare Fleet's results for greedy requests with it. Knows nothing of Fleet.
"""

import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SAMPLE_RATE_HZ = 16000
HOP_SAMPLES = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleAnswer:
    """Answer of the oracle. Shapes: `token_ids` holds the sampled answer tokens, the last one
    included, whether or not it is the end token; `codes_QT` Q codebooks x T frames; `wave` float32
    mono at 24 kHz, the whole `code2wav(codes)` in one piece.
    """

    token_ids: list[int]
    codes: NDArray[np.int64]
    wave: NDArray[np.float32]


def from_pretrained(class_name: str, folder: Path, **options: Any) -> Any:
    """Load a model or processor class of `transformers` from a folder. The result is untyped, since
    the class's annotations are incomplete.
    """
    return getattr(import_module("transformers"), class_name).from_pretrained(folder, **options)


class _EndOfAnswer(Exception):
    """Raised inside `generate()` to leave it where it would crash because there is nothing to
    speak.
    """


def n_audio_tokens(num_samples: int, longest_samples: int | None = None) -> int:
    """Return the number of audio positions of a clip in the processor's prompt.

    Units: samples at 16 kHz; `num_samples` must exceed 200 (the feature extractor reflects its
    padding). `longest_samples`: length of the longest clip of the request. A clip padded to that
    length keeps its last partial window of 10 ms, which a clip on its own loses.
    """
    longest_samples = longest_samples or num_samples
    frames = min(-(-num_samples // HOP_SAMPLES), longest_samples // HOP_SAMPLES)
    chunks, tail = divmod(frames, 100)
    for _ in range(3):  # three convolutions of stride 2
        tail = (tail + 1) // 2
    return 13 * chunks + tail


class Oracle:
    """A checkpoint folder loaded by `transformers` in float32. Sets the process's number of torch
    threads.
    """

    def __init__(self, folder: Path, *, num_threads: int = 1) -> None:
        torch.set_num_threads(num_threads)
        self.model = from_pretrained(
            "Qwen3OmniMoeForConditionalGeneration", folder, dtype=torch.float32
        ).eval()
        self.features = from_pretrained("WhisperFeatureExtractor", folder)
        self.eos_token_id: int = self.model.generation_config.eos_token_id
        self.pad_token_id: int = self.model.generation_config.pad_token_id

    def answer(
        self,
        prompt_ids: Sequence[int],
        audio: Sequence[NDArray[np.float32]] = (),
        *,
        speaker: str = "ethan",
        thinker_max_new_tokens: int,
        talker_max_new_tokens: int,
        **overrides: Any,
    ) -> OracleAnswer:
        """Answer one prompt greedily.

        Shapes: each clip of `audio` is mono at 16 kHz; `prompt_ids` already holds `n_audio_tokens`
        pads for each. `overrides` go to `generate()` as they are (`talker_repetition_penalty=1.0`).
        An answer of one token, or speech of one sampled code, crashes `transformers`: there the
        codes are Q x 0 and the wave is empty.
        """
        input_ids = torch.tensor([list(prompt_ids)])
        arguments: dict[str, Any] = {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "speaker": speaker,
            "thinker_max_new_tokens": thinker_max_new_tokens,
            "thinker_eos_token_id": self.eos_token_id,
            "thinker_pad_token_id": self.pad_token_id,
            "thinker_do_sample": False,
            "talker_max_new_tokens": talker_max_new_tokens,
            "talker_do_sample": False,
        }
        with self._recording() as record:
            # _EndOfAnswer: nothing was spoken, and what was recorded is the answer.
            with suppress(_EndOfAnswer), warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", message="Passing `repetition_penalty` with `inputs_embeds`"
                )
                self.model.generate(**(arguments | self.audio_inputs(audio) | overrides))
        num_groups = self.model.config.talker_config.num_code_groups
        codes = record.get("codes", torch.zeros(1, num_groups, 0, dtype=torch.long))
        wave = record.get("wave", torch.zeros(0))
        return OracleAnswer(
            token_ids=[int(token) for token in record["sequences"][0, len(prompt_ids) :]],
            codes=codes[0].numpy(),
            wave=wave.flatten().numpy(),
        )

    def audio_inputs(self, audio: Sequence[NDArray[np.float32]]) -> dict[str, Tensor]:
        """Return features as `Qwen3OmniMoeProcessor` computes them; empty without audio.

        Shapes: `input_features` clips x 128 mel bins x frames, `feature_attention_mask` clips x
        frames.
        """
        if not audio:
            return {}
        made = self.features(
            list(audio),
            sampling_rate=SAMPLE_RATE_HZ,
            padding=True,
            truncation=False,
            return_attention_mask=True,
            return_tensors="pt",
        )
        return {
            "input_features": made["input_features"],
            "feature_attention_mask": made["attention_mask"],
        }

    @torch.no_grad()
    def decode(self, codes: NDArray[np.int64]) -> NDArray[np.float32]:
        """Decode the whole waveform of `codes`, Q codebooks x T frames."""
        return self.model.code2wav(torch.as_tensor(codes)[None]).flatten().numpy()

    @contextmanager
    def _recording(self) -> Generator[dict[str, Tensor]]:
        """Record the Thinker's sequence and the codes of a `generate()` call, and decode the codes
        in one piece.
        """
        record: dict[str, Tensor] = {}
        model = self.model
        thinker_generate, talker_generate = model.thinker.generate, model.talker.generate

        def record_thinker(input_ids: Tensor, **arguments: Any) -> Any:
            result = thinker_generate(input_ids=input_ids, **arguments)
            record["sequences"] = result.sequences
            return _require_more_than_one(result, result.sequences.shape[1] - input_ids.shape[1])

        def record_talker(**arguments: Any) -> Any:
            result = talker_generate(**arguments)
            return _require_more_than_one(result, result.sequences.shape[1])

        def decode_whole(codes: Tensor, **_: int) -> Tensor:
            record["codes"] = codes
            record["wave"] = model.code2wav(codes)
            return record["wave"]

        with (
            _replaced(model.thinker, "generate", record_thinker),
            _replaced(model.talker, "generate", record_talker),
            _replaced(model.code2wav, "chunked_decode", decode_whole),
        ):
            yield record


def _require_more_than_one(result: Any, num_sampled: int) -> Any:
    if num_sampled <= 1:
        raise _EndOfAnswer
    return result


@contextmanager
def _replaced(module: torch.nn.Module, name: str, function: Callable[..., Any]) -> Generator[None]:
    """Replace a method of one module object for the duration of the block."""
    assert name not in vars(module)
    setattr(module, name, function)
    try:
        yield
    finally:
        delattr(module, name)
