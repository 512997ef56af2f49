"""Answers of one stage computed in this process, without a fleet. Knows no model."""

from collections.abc import Sequence

from fleet.core.request import RequestSpec
from fleet.engine.base import TOKEN
from fleet.stages.base import BuiltStage

Answers = list[list[int]]


def answer(built: BuiltStage, specs: Sequence[RequestSpec], batch: int) -> Answers:
    """Compute the answers to the requests, at most `batch` at a time, and return the sampled tokens
    of each request, in order. Raises: FleetError if a request fails.
    """
    answers: dict[str, list[int]] = {spec.id: [] for spec in specs}
    waiting, num_open = iter(specs), 0
    while True:
        while num_open < batch and (spec := next(waiting, None)) is not None:
            request, pieces = built.adapter(spec, None).open()
            built.engine.submit(request)
            for piece in pieces:
                built.engine.feed(spec.id, piece)
            num_open += 1
        if not num_open:
            return list(answers.values())
        for output in built.engine.step():
            if output.error is not None:
                raise output.error
            answers[output.request_id] += output.arrays[TOKEN].tolist()
            num_open -= output.final
