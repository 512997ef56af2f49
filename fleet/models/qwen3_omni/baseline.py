"""The reference implementation for benchmarks: `transformers` answers requests one after another,
each by one call of `generate()`.

`generate()` returns audio only when it is complete, so the first and the last sample arrive
together. Knows only requests.
"""

import math
import time
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import torch

from fleet.core.ids import StageName
from fleet.core.request import RequestSpec

THINKER, TALKER = StageName("thinker"), StageName("talker")
ANSWER_RATE_HZ = 24_000
MODEL_CLASS = "Qwen3OmniMoeForConditionalGeneration"


PROBE_TOKENS, PROBE_RUNS = 6, 5


class BaselineWork(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that the reference implementation is to answer, and its settings, written by the
    benchmark.

    `messages`: chat of each request, from which its prompt is built again for comparison.
    `warm_up`: uncounted runs of the first request. `num_threads`: numbers of threads to try. The
    number that answers a short request fastest is used, since too many threads slow small models
    down, and a slow reference would make the comparison unfair.
    """

    requests: tuple[RequestSpec, ...]
    messages: tuple[list[dict[str, str]], ...]
    num_threads: tuple[int, ...]
    device: str
    dtype: str
    warm_up: int


class BaselineAnswer(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float
    first_audio_s: float
    num_samples: int
    sample_rate_hz: int
    answer_ids: tuple[int, ...]
    same_prompt: bool


class BaselineResult(msgspec.Struct, frozen=True, kw_only=True):
    answers: tuple[BaselineAnswer, ...]
    load_s: float
    num_threads: int
    device: str
    dtype: str


class Baseline:
    """A checkpoint loaded by `transformers`. Source: transformers 5.23, modeling_qwen3_omni_moe.py,
    `generate()`.
    """

    def __init__(self, folder: Path, *, device: str, dtype: str) -> None:
        library = import_module("transformers")
        self._device = device
        model = getattr(library, MODEL_CLASS)
        self._model: Any = model.from_pretrained(
            folder, dtype=getattr(torch, dtype), use_safetensors=True
        ).eval()
        self._model.to(device)
        self._tokenizer: Any = library.AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False
        )

    def answer(self, spec: RequestSpec, messages: list[dict[str, str]]) -> BaselineAnswer:
        """Answer a request by greedy decoding, with the request's own limits and voice, and return
        the measured times.
        """
        prompt = torch.tensor([spec.prompt_ids], device=self._device)
        model = self._model
        began_s = time.perf_counter()
        sequences, wave = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            speaker=spec.params["voice"],
            thinker_max_new_tokens=spec.sampling[THINKER].max_tokens,
            thinker_eos_token_id=model.generation_config.eos_token_id,
            thinker_pad_token_id=model.generation_config.pad_token_id,
            thinker_do_sample=False,
            talker_max_new_tokens=spec.sampling[TALKER].max_tokens,
            talker_repetition_penalty=spec.sampling[TALKER].repetition_penalty,
            talker_do_sample=False,
        )
        samples = wave.reshape(-1).cpu()
        seconds = time.perf_counter() - began_s
        return BaselineAnswer(
            seconds=seconds,
            first_audio_s=seconds,
            num_samples=len(samples),
            sample_rate_hz=ANSWER_RATE_HZ,
            answer_ids=tuple(sequences[0, prompt.shape[1] :].tolist()),
            same_prompt=self._tokenize(messages) == list(spec.prompt_ids),
        )

    def _tokenize(self, messages: list[dict[str, str]]) -> list[int]:
        return self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )


def pick_num_threads(baseline: Baseline, work: BaselineWork) -> int:
    """Return the number in `work.num_threads` whose best time over a few short answers is lowest.
    The runs are interleaved, so that noise affects all numbers alike.
    """
    if len(work.num_threads) == 1:
        return work.num_threads[0]
    spec = work.requests[0]
    bounded = {
        stage: msgspec.structs.replace(s, max_tokens=PROBE_TOKENS)
        for stage, s in spec.sampling.items()
    }
    probe = msgspec.structs.replace(spec, sampling=bounded)
    best_s = dict.fromkeys(work.num_threads, math.inf)
    for count in work.num_threads * PROBE_RUNS:
        torch.set_num_threads(count)
        best_s[count] = min(best_s[count], baseline.answer(probe, work.messages[0]).seconds)
    return min(best_s, key=lambda count: best_s[count])


def run(work: BaselineWork, folder: Path) -> BaselineResult:
    """Load the checkpoint and answer all requests; print the progress after each request."""
    warnings.filterwarnings("ignore", module="transformers")
    device = work.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = work.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    began_s = time.perf_counter()
    baseline = Baseline(folder, device=device, dtype=dtype)
    load_s = time.perf_counter() - began_s
    torch.set_num_threads(pick_num_threads(baseline, work))
    for _ in range(work.warm_up):
        baseline.answer(work.requests[0], work.messages[0])
    answers: list[BaselineAnswer] = []
    for spec, messages in zip(work.requests, work.messages, strict=True):
        answers.append(baseline.answer(spec, messages))
        print(f"{len(answers)}/{len(work.requests)}", flush=True)
    return BaselineResult(
        answers=tuple(answers),
        load_s=load_s,
        num_threads=torch.get_num_threads(),
        device=device,
        dtype=dtype,
    )
