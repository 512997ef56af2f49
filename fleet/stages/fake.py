"""Stages of any graph on the fake engine, for tests: every edge carries numbers computed from the
numbers before, without weights.

Equal inputs give equal outputs, so a new owner of a task recomputes logged output; only an answer
supplied by the request is history.
"""

from collections.abc import Sequence

import numpy as np

from fleet.core.chunk import PROMPT_TOKENS
from fleet.core.errors import BadInput
from fleet.core.ids import PREFILL, EdgeName, Walk
from fleet.core.request import RequestSpec, Sampling
from fleet.engine.base import Arrays, EngineInput, EngineOutput, EngineRequest
from fleet.engine.fake import OUT, FakeEngine
from fleet.graphs import Edge
from fleet.stages.base import NO_OUTPUT, BuiltStage, EdgeItem, LoggedOutput, TaskAdapter
from fleet.stages.options import BuildOptions

SAMPLES_PER_ROW = 1920
FIRST_LETTER, NUM_LETTERS = ord("a"), 26


class _Output:
    """Output edge of a task: converts rows of numbers to arrays of the edge's first tensor.
    Converts all rows at once, since every chunk passes through here. An edge with a tensor `text`
    gets one letter per row, of the first clip.
    """

    def __init__(self, edge: Edge) -> None:
        self.name = edge.name
        self._tensors = edge.tensors
        self._tensor, dtype = next(iter(edge.tensors.items()))
        self._dtype = np.dtype(dtype)

    def pieces(self, rows: np.ndarray) -> list[Arrays]:
        """Return the arrays of one item per row. Shapes: rows int32 [n, width]."""
        values = rows.astype(self._dtype, copy=False)
        if self._tensor == "pcm":
            samples = np.tile(values, (1, -(-SAMPLES_PER_ROW // rows.shape[1])))
            return [{self._tensor: row[:SAMPLES_PER_ROW]} for row in samples]
        if "text" in self._tensors:
            return [self._text_piece(values[i : i + 1, 0]) for i in range(len(rows))]
        values = values if rows.shape[1] > 1 else values[:, 0]
        return [{self._tensor: values[i : i + 1]} for i in range(len(rows))]

    def _text_piece(self, row: np.ndarray) -> Arrays:
        known = {
            "clip": np.zeros(1, np.int32),
            "sizes": np.ones(1, np.int32),
            "ids": row.astype(np.int32),
            "report": np.zeros(0, np.uint8),
            "text": (FIRST_LETTER + row % NUM_LETTERS).astype(np.uint8),
        }
        return {name: known[name] for name in self._tensors}


class FakeTask(TaskAdapter):
    """Adapter of a task on the fake engine. A stage reads its input edges; the main stage, and a
    stage without input edges in this request, also read the prompt, or the text to speak if the
    request has one. Every output row becomes an item on each output edge.
    """

    def __init__(self, spec: RequestSpec, options: BuildOptions) -> None:
        graph = options.config.graph_declaration()
        self._spec = spec
        self._stage = options.stage
        edges = graph.edges_of(spec)
        self._outputs = [_Output(edge) for edge in edges if edge.source == options.stage]
        self._has_inputs = any(edge.target == options.stage for edge in edges)
        self._is_main = options.declared.main
        self._num_read, self._num_sent = 0, 0

    def open(self, logged: LoggedOutput = NO_OUTPUT) -> tuple[EngineRequest, Sequence[EngineInput]]:
        """Return the engine request and prompt. Raises: BadInput if the request has a rule for the
        answer, or sampling settings about single token ids such as `logit_bias`.
        """
        sampling = self._spec.sampling.get(self._stage, Sampling())
        if sampling.constraint is not None:
            raise BadInput(
                "response_format: engine fake keeps no rule; use engine: torch",
                param="response_format",
            )
        if not sampling.is_plain:
            raise BadInput(
                "logit_bias: engine fake has no logits; use engine: torch", param="logit_bias"
            )
        if self._has_inputs and not self._is_main:
            return EngineRequest(request_id=self._spec.id, sampling=sampling), ()
        history = {OUT: np.array(self._spec.given, np.int32)[:, None]} if self._is_main else {}
        request = EngineRequest(request_id=self._spec.id, sampling=sampling, history=history)
        prompt = np.asarray(self._spec.prompt_ids, dtype=np.int32)
        if self._spec.speech_text:
            prompt = np.frombuffer(self._spec.speech_text.encode(), np.uint8).astype(np.int32)
        self._num_read = len(prompt)
        piece = EngineInput(walk=PREFILL, arrays={"ids": prompt}, final=not self._has_inputs)
        return request, (piece,)

    def consume(
        self, edge: EdgeName, walk: Walk, arrays: Arrays, *, final: bool
    ) -> Sequence[EngineInput]:
        self._num_read += max(map(len, arrays.values()), default=0)
        return (EngineInput(walk=walk, arrays=arrays, final=final),)

    def produce(self, output: EngineOutput) -> Sequence[EdgeItem]:
        rows = output.arrays[OUT]
        items: list[EdgeItem] = []
        for edge in self._outputs:
            pieces = edge.pieces(rows) or [{}]
            for position, arrays in enumerate(pieces):
                last = output.final and position == len(pieces) - 1
                if arrays or last:
                    items.append(
                        EdgeItem(
                            edge=edge.name,
                            walk=output.walk,
                            arrays=arrays,
                            final=last,
                            figures=self._figures(),
                        )
                    )
        self._num_sent += len(rows)
        return items

    def _figures(self) -> dict[str, int]:
        """Return the length of the prompt before the first output, if only the input edges of the
        main stage tell it; otherwise no figures.
        """
        is_told = self._is_main and self._has_inputs and not self._num_sent
        return {PROMPT_TOKENS: self._num_read} if is_told else {}


def build(options: BuildOptions) -> BuiltStage:
    """Build a stage of any graph on the fake engine: a codec if an input edge has a ramp or an
    output edge carries audio, otherwise an autoregressive stage.

    `extra.step_ms` is the interval between the steps of each request, 0 by default.
    """
    graph = options.config.graph_declaration()
    inputs = graph.edges_to(options.stage)
    codec = any(edge.policy.kind == "ramp" for edge in inputs) or any(
        "pcm" in edge.tensors for edge in graph.edges_from(options.stage)
    )
    source = not inputs or options.declared.main
    width = 1 if source or codec else 16
    engine = FakeEngine(
        max_batch=options.own.max_batch,
        width=width,
        autoregressive=not codec,
        source=source,
        step_s=_step_s(options),
    )
    return BuiltStage(engine=engine, adapter=lambda spec, _blob: FakeTask(spec, options))


def _step_s(options: BuildOptions) -> float:
    """Return `extra.step_ms` in seconds. Raises: ConfigError if it is not a number of
    milliseconds.
    """
    step_ms = options.own.extra.get("step_ms", 0)
    if isinstance(step_ms, str | bool) or step_ms < 0:
        raise options.refusal(
            "extra.step_ms",
            f"{step_ms!r} is no number of milliseconds; leave it out, or give one such as 80",
        )
    return step_ms / 1000
