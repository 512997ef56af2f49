"""Capture of live answers for training: a share of the answers to clients that allow it, and only
answers sampled by the model.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from fleet.config.schema import TrainingConfig
from fleet.core.request import RequestSpec
from fleet.graphs.training import TRAINED
from tests.support import wait_until
from tests.web.conftest import ASK, Loaded, ServedGateway, serving

CHAT, SPEECH = "/v1/chat/completions", "/v1/audio/speech"


@pytest.fixture
def gateway(loaded: Loaded) -> Iterator[ServedGateway]:
    training = TrainingConfig(enabled=True, share=1.0)
    with serving(
        replace(loaded, config=loaded.config.model_copy(update={"training": training}))
    ) as gateway:
        yield gateway


def captures(gateway: ServedGateway) -> list[tuple[RequestSpec, bytes | None]]:
    return [(spec, blob) for spec, blob in gateway.client.submitted if spec.outputs == (TRAINED,)]


def ask(gateway: ServedGateway, **fields: object) -> RequestSpec:
    """Send a chat request; return the request that the gateway submitted for it."""
    answer = gateway.http.post(CHAT, json={**ASK, **fields})
    assert answer.status_code == 200
    return next(
        spec for spec, _ in reversed(gateway.client.submitted) if spec.outputs != (TRAINED,)
    )


def answer_ids(gateway: ServedGateway, spec: RequestSpec) -> tuple[int, ...]:
    chunks = [chunk for chunk in gateway.client.chunks_of(spec) if chunk.edge == "text"]
    return tuple(
        int(token)
        for chunk in chunks
        for token in np.frombuffer(chunk.tensors["ids"].data or b"", "<i4")
    )


def test_answer_is_captured_with_its_prompt_and_its_tokens(gateway: ServedGateway) -> None:
    spec = ask(gateway)
    wait_until(
        lambda: gateway.client.training.counted["acknowledged"] == 1, "the answer to be trained on"
    )
    ((capture, blob),) = captures(gateway)
    assert (
        capture.given == answer_ids(gateway, spec)
        and capture.prompt_ids == spec.prompt_ids
        and blob is None
    )
    assert (capture.kind, capture.body, capture.session) == (
        "capture",
        "",
        "",
    ) and capture.id != spec.id


def test_answer_with_store_false_is_not_captured(gateway: ServedGateway) -> None:
    ask(gateway, store=False)
    ask(gateway, store=True)
    wait_until(
        lambda: gateway.client.training.counted["acknowledged"] == 1,
        "the second answer to be trained on",
    )
    assert len(captures(gateway)) == 1


def test_text_to_speak_is_not_captured(gateway: ServedGateway) -> None:
    """Text to speak is not captured, since its tokens are the client's and not the model's."""
    assert (
        gateway.http.post(SPEECH, json={"model": "omni", "input": "Hello there."}).status_code
        == 200
    )
    ask(gateway)
    wait_until(
        lambda: gateway.client.training.counted["acknowledged"] == 1, "the answer to be trained on"
    )
    assert len(captures(gateway)) == 1


def test_answer_is_shed_and_counted_while_a_request_waits(gateway: ServedGateway) -> None:
    gateway.client.training.waiting = True
    ask(gateway)
    wait_until(lambda: gateway.client.training.counted["shed"] == 1, "the answer to be shed")
    assert captures(gateway) == []


def test_nothing_is_captured_by_default(loaded: Loaded) -> None:
    with serving(loaded) as gateway:
        ask(gateway)
    assert captures(gateway) == []
