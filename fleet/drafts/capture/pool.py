"""Pools of prompts to train on: lines of a file, or prepared requests. The fleet generates answers
that are missing.
"""

import json
from collections.abc import AsyncIterator, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from fleet.config import FleetConfig
from fleet.core.clock import now_us
from fleet.core.errors import BadInput
from fleet.core.ids import EdgeName, new_request_id
from fleet.core.request import RequestSpec, Sampling
from fleet.drafts.capture.source import AnsweredPrompt, CapturePort, patiently
from fleet.processing import ChatRequest, Frontend, GivenAnswer, Message, TextPart

EXAMPLE = '{"prompt": "What is ten plus five?", "answer": "fifteen"}'
ROLES = ("system", "user", "assistant")


def read_pool(path: Path, config: FleetConfig, frontend: Frontend) -> Iterator[RequestSpec]:
    """Yield a request for each line of a pool file. A line is a JSON object: `prompt` (text) or
    `messages` (as in chat completions, text only), and optionally `answer`; without it, the fleet
    generates the answer.

    Raises: BadInput naming the line and the remedy.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read as text ({error})", param="pool") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _spec_of_line(line, f"{path}:{number}", config, frontend)


def _spec_of_line(line: str, where: str, config: FleetConfig, frontend: Frontend) -> RequestSpec:
    try:
        given = json.loads(line)
    except ValueError as error:
        raise BadInput(
            f"{where}: no JSON ({error}); write lines like {EXAMPLE}", param="pool"
        ) from error
    if not isinstance(given, dict) or ("prompt" in given) == ("messages" in given):
        raise BadInput(
            f"{where}: needs either prompt or messages; write lines like {EXAMPLE}", param="pool"
        )
    fields = cast("dict[str, Any]", given)
    unknown = sorted(set(fields) - {"prompt", "messages", "answer"})
    if unknown:
        raise BadInput(
            f"{where}: unknown field {unknown[0]}; write lines like {EXAMPLE}", param="pool"
        )
    turns = fields.get("messages", [{"role": "user", "content": fields.get("prompt")}])
    answer = fields.get("answer")
    if (
        not isinstance(turns, list)
        or not turns
        or not all(map(_is_turn, cast("list[object]", turns)))
    ):
        raise BadInput(
            f"{where}: prompt, and each message's content, must be text, role one of "
            f"{', '.join(ROLES)}",
            param="pool",
        )
    if answer is not None and (not isinstance(answer, str) or not answer):
        raise BadInput(f"{where}: answer must be text; leave it out to ask the fleet", param="pool")
    messages = tuple(
        Message(role=turn["role"], content=TextPart(text=turn["content"], where=where))
        for turn in cast("list[dict[str, Any]]", turns)
    )
    return prepare(
        messages, config, frontend, TextPart(text=answer, where=where) if answer is not None else ()
    )


def _is_turn(turn: object) -> bool:
    if not isinstance(turn, dict):
        return False
    fields = cast("dict[str, object]", turn)
    return (
        fields.get("role") in ROLES
        and isinstance(fields.get("content"), str)
        and bool(fields["content"])
    )


def prepare(
    messages: tuple[Message, ...], config: FleetConfig, frontend: Frontend, given: GivenAnswer = ()
) -> RequestSpec:
    """Return a text request with greedy sampling, within the deployment's limits. `given`: the
    answer, if it is known.

    Raises: BadInput, InputTooLarge.
    """
    graph = config.graph_declaration()
    chat = ChatRequest(
        id=new_request_id(),
        graph=graph.name,
        messages=messages,
        outputs=_text_edges(config),
        spoken=False,
        given=given,
        sampling={graph.main_stage.name: Sampling(max_tokens=config.limits.max_answer_tokens)},
        created_us=now_us(),
    )
    return frontend.prepare(chat)[0]


def _text_edges(config: FleetConfig) -> tuple[EdgeName, ...]:
    return tuple(
        edge for edge, medium in config.graph_declaration().media.items() if medium == "text"
    )


async def answered(
    specs: Iterable[RequestSpec], client: CapturePort
) -> AsyncIterator[AnsweredPrompt]:
    """Yield each request with its answer, which the fleet generates if the request has none. A
    request whose generated answer is empty is left out.

    Raises: FleetError of a failed request.
    """
    for spec in specs:
        if spec.given:
            yield AnsweredPrompt(spec=spec, answer=spec.given)
            continue
        asked = partial(_answer_of, spec, client)
        if tokens := await patiently(asked):
            yield AnsweredPrompt(spec=spec, answer=tokens)


async def _answer_of(spec: RequestSpec, client: CapturePort) -> list[int]:
    """Submit the request under a new id, and return the token ids of the fleet's answer. Raises:
    FleetError of the request.
    """
    tokens: list[int] = []
    async for chunk in await client.requests.submit(
        msgspec.structs.replace(spec, id=new_request_id(), kind="text"), None
    ):
        tensor = chunk.tensors.get("ids")
        if tensor is not None and tensor.data is not None:
            tokens += np.frombuffer(tensor.data, "<i4").tolist()
    return tokens
