"""Large inputs are parsed in one thread, in linear time and memory, while the event loop serves
other clients.
"""

import asyncio
import json
import sys
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

from fleet.core.errors import UnsupportedValue
from tests.support import wait_until
from tests.web.conftest import ASK, ServedGateway
from tests.web.test_bad_input import post
from web.gateway.stored_body import stored_body
from web.http.offload import INLINE_BYTES, read_in_thread
from web.schema.chat import parse_chat

LARGE = {**ASK, "metadata": {"note": "x" * INLINE_BYTES}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", LARGE),
        ("/v1/audio/speech", {"model": "omni", "input": "hello", "user": "x" * INLINE_BYTES}),
        (
            "/v1/realtime/client_secrets",
            {"session": {"type": "realtime", "tracing": {"group_id": "x" * INLINE_BYTES}}},
        ),
    ],
)
def test_large_body_is_parsed_while_others_are_served(
    gateway: ServedGateway, path: str, body: dict[str, object]
) -> None:
    begun, release = threading.Event(), threading.Event()

    def hold_the_thread() -> None:
        begun.set()
        assert release.wait(20)

    with ThreadPoolExecutor(2) as pool:
        holding = pool.submit(lambda: asyncio.run(read_in_thread(hold_the_thread)))
        assert begun.wait(20)
        large = pool.submit(gateway.http.post, path, json=body)
        assert gateway.http.get("/health").status_code == 200
        assert post(gateway, ASK).status_code == 200
        assert not large.done()
        release.set()
        assert large.result(20).status_code == 200
        holding.result(20)


def num_calls(work: Callable[[], object]) -> int:
    """Return the number of Python functions that `work` enters."""
    num = 0

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal num
        num += event == "call"

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return num


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the peak memory of Python objects during `work`."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def chat(**fields: object) -> bytes:
    return json.dumps({**ASK, **fields}).encode()


def nested(value: object, depth: int) -> object:
    return value if depth == 0 else {"a": nested(value, depth - 1)}


def refusal_of(body: bytes) -> UnsupportedValue:
    with pytest.raises(UnsupportedValue) as refused:
        parse_chat(body)
    return refused.value


def test_nested_unknown_field_is_searched_once_and_not_at_each_level() -> None:
    body = chat(other=nested([""] * 5_000, 6))
    assert num_calls(lambda: refusal_of(body)) < 10 * 5_000


def test_long_name_and_value_of_an_unknown_field_are_not_copied() -> None:
    body = chat(**{"-A" * 1_000_000: "x"}, other="-A" * 1_000_000)
    assert peak_bytes(lambda: refusal_of(body)) < 3 * len(body)


@pytest.mark.parametrize(
    "field",
    [{"text": "x" * 8_000_000}, {"list": ["x" * 100] * 60_000}, {"numbers": [10**4_000] * 500}],
    ids=["text", "list", "numbers"],
)
def test_too_large_body_is_not_stored(field: dict[str, object]) -> None:
    body = parse_chat(chat(metadata=field))
    assert stored_body(body) == "" and peak_bytes(lambda: stored_body(body)) < 1_000_000


def test_small_body_is_stored() -> None:
    kept = json.loads(stored_body(parse_chat(chat(metadata={"text": "x", "number": 10**30}))))
    assert kept["metadata"] == {"text": "x", "number": 10**30}


def test_large_inputs_are_parsed_sequentially_in_one_thread() -> None:
    """Large inputs are parsed one after another, in one thread; otherwise several would be expanded
    in memory together.
    """
    names: list[str] = []

    async def read_many() -> None:
        await asyncio.gather(
            *(
                read_in_thread(lambda: names.append(threading.current_thread().name))
                for _ in range(20)
            )
        )

    asyncio.run(read_many())
    wait_until(lambda: len(names) == 20, "all to be read")
    assert len(set(names)) == 1 and names[0] != threading.current_thread().name
