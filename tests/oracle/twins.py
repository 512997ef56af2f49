"""The slow twin of the speaking graph, for tests that vary stages, numerics or chunks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleet.core.ids import RequestId, StageName
from fleet.core.request import RequestSpec
from fleet.engine.torch.lm_engine import LMEngine
from fleet.graphs import Graph, get_graph
from fleet.lab.measure.twin import Answers, Policy, SlowTwin, declared_policy
from fleet.stages.base import BuiltStage
from fleet.stages.options import BuildOptions
from tests.oracle.cases import CASES, CODES, TEXT, Case, make_frontend, spec_of
from tests.oracle.oracle import OracleAnswer
from tests.stage_options import stage_options

Truth = Mapping[str, OracleAnswer]
Built = dict[StageName, BuiltStage]
SPEAKING = (StageName("thinker"), StageName("talker"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinRequests:
    """Requests ready to run, and the case of each."""

    cases: tuple[Case, ...]
    specs: tuple[RequestSpec, ...]
    blobs: dict[RequestId, bytes]


def ask(
    checkpoint: Path, cases: Sequence[Case] = CASES, *, temperature: float = 0.0
) -> TwinRequests:
    """Return each case's request as a gateway creates it, with different seeds."""
    frontend = make_frontend(checkpoint)
    made = [
        spec_of(case, frontend, temperature=temperature, seed=100 + n)
        for n, case in enumerate(cases)
    ]
    blobs = {spec.id: blob for spec, blob in made if blob is not None}
    return TwinRequests(cases=tuple(cases), specs=tuple(spec for spec, _ in made), blobs=blobs)


def with_invalid_audio(asked: TwinRequests) -> tuple[RequestSpec, dict[RequestId, bytes]]:
    """Return the request that has audio, and all audio blobs, after replacing one of its samples by
    NaN.
    """
    invalid = next(
        spec for spec, case in zip(asked.specs, asked.cases, strict=True) if case.name == "audio"
    )
    samples = np.frombuffer(asked.blobs[invalid.id], np.float32).copy()
    samples[1000] = np.nan
    return invalid, {**asked.blobs, invalid.id: samples.tobytes()}


def build_stage(graph: Graph, options: BuildOptions) -> BuiltStage:
    module, _, name = graph.stage(options.stage).builder.partition(":")
    return getattr(import_module(module), name)(options)


def speaking_stages(
    checkpoint: Path,
    *,
    numerics: str = "fast",
    prefill_chunk_tokens: int = 256,
    max_batch: int = 16,
    kv_pages: int = 512,
    stages: Sequence[StageName] = SPEAKING,
) -> Built:
    """Build all stages of the speaking graph with the same options."""
    graph = get_graph("qwen3_omni")
    return {
        stage: build_stage(
            graph,
            stage_options(
                stage=stage,
                checkpoint=checkpoint,
                numerics=numerics,
                prefill_chunk_tokens=prefill_chunk_tokens,
                max_batch=max_batch,
                kv_pages=kv_pages,
            ),
        )
        for stage in stages
    }


def speaking_twin(built: Built, policy: Policy = declared_policy) -> SlowTwin:
    return SlowTwin(get_graph("qwen3_omni"), built, policy)


def tokens_of(answers: Answers, request: RequestId) -> list[int]:
    return [int(token) for arrays in answers[request][TEXT] for token in arrays["ids"]]


def codes_of(answers: Answers, request: RequestId) -> NDArray[np.int32]:
    """Return a request's codes [Q, frames]; Q is 0 without speech."""
    frames = [arrays["codes"] for arrays in answers[request][CODES]]
    return np.concatenate(frames).T if frames else np.empty((0, 0), np.int32)


def assert_all_pages_free(built: Built) -> None:
    for stage in built.values():
        if isinstance(stage.engine, LMEngine):
            stage.engine.pool.check()
            assert stage.engine.stats().running == 0
            assert stage.engine.stats().kv.pages_used == 0
