"""Allocation failures around a request's work: a hand-off recomputes without its blocks, any other
failure ends one request.

The worker survives, and its other requests are unaffected. `test_poison` covers failures in an
engine's steps.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from fleet.core.errors import FleetError, OutOfMemory
from fleet.core.ids import EdgeName, RequestId
from fleet.core.request import RequestSpec
from fleet.engine.fake import FakeKVTransfer
from fleet.transfer.nixl import NixlTransfer
from fleet.transfer.peer_link import NixlPull
from fleet.worker.loop import grants
from tests.harness import answer, assert_same, fake_spec, gateway, thread_fleet
from tests.storm import assert_nothing_left
from tests.support import REPO

SPLIT = REPO / "configs" / "thinker_pd.yaml"
ERRORS = [MemoryError(), RuntimeError("can't allocate memory")]
"""The forms in which Python, numpy and torch report missing memory."""


def fail_calls(
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    name: str,
    error: Exception,
    is_selected: Callable[..., bool],
) -> list[str]:
    """Make the calls selected by their arguments raise; return the list that records each."""
    original, failed_calls = getattr(owner, name), list[str]()

    def call_or_fail(*args: Any, **named: Any) -> object:
        if is_selected(*args):
            failed_calls.append(name)
            raise error
        return original(*args, **named)

    monkeypatch.setattr(owner, name, call_or_fail)
    return failed_calls


class LendingPool:
    """Pool of a fake engine, in which no pages can be lent."""

    memory = None

    def lend(self, _request: RequestId) -> None:
        return None


def any_call(*_args: object) -> bool:
    return True


def is_kv_owner(_transfer: NixlTransfer, owner: RequestId, *_tensor: object) -> bool:
    return owner.endswith("/kv")


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    ("owner", "name", "is_selected"),
    [
        (LendingPool, "lend", any_call),
        (FakeKVTransfer, "export_blocks", any_call),
        (NixlTransfer, "publish", is_kv_owner),
        (NixlPull, "poll", any_call),
        (FakeKVTransfer, "import_blocks", any_call),
    ],
    ids=["lend", "export", "publish", "pull", "import"],
)
async def test_hand_off_without_memory_recomputes_the_prefix(
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    name: str,
    is_selected: Callable[..., bool],
    error: Exception,
) -> None:
    if name == "lend":  # pages are lent only where memory is shared
        monkeypatch.setattr(NixlTransfer, "shares_memory", True)
        monkeypatch.setattr(FakeKVTransfer, "pages", LendingPool())
    with thread_fleet(redis_url, file=SPLIT, transfer="nixl") as fleet:
        async with gateway(fleet) as client:
            expected = await answer(client, fake_spec(fleet))
            failed_calls = fail_calls(monkeypatch, owner, name, error, is_selected)
            for _ in range(2):
                assert_same(await answer(client, fake_spec(fleet)), expected)
        assert len(failed_calls) >= 2 and not fleet.killed, "no worker died"
        assert_nothing_left(fleet)


async def fail_one_of_two(url: str, fail_calls_of: Callable[[RequestId], list[str]]) -> FleetError:
    """Return the error of a request without memory; a concurrent request receives its complete
    answer.
    """
    with thread_fleet(url, transfer="nixl") as fleet:
        async with gateway(fleet) as client:
            expected = await answer(client, fake_spec(fleet))
            spec, other_spec = fake_spec(fleet), fake_spec(fleet)
            failed_calls = fail_calls_of(spec.id)

            async def read_error(spec: RequestSpec) -> FleetError:
                with pytest.raises(FleetError) as caught:
                    await answer(client, spec)
                return caught.value

            failed, received = await asyncio.gather(read_error(spec), answer(client, other_spec))
            assert_same(received, expected)
            assert_same(await answer(client, fake_spec(fleet)), expected)
        assert failed_calls and not fleet.killed, "no worker died"
        assert_nothing_left(fleet)
    return failed


async def test_chunk_without_memory_fails_its_request(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, pulled: EdgeName
) -> None:
    def fail_calls_of(request: RequestId) -> list[str]:
        return fail_calls(
            monkeypatch,
            NixlTransfer,
            "publish",
            MemoryError(),
            lambda _transfer, owner, *_: owner == request,
        )

    assert isinstance(await fail_one_of_two(redis_url, fail_calls_of), OutOfMemory), pulled


async def test_replayed_logs_without_memory_fail_their_request(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_calls_of(request: RequestId) -> list[str]:
        return fail_calls(
            monkeypatch,
            grants,
            "parse_claim",
            MemoryError(),
            lambda reply, *_: request.encode() in reply[1],
        )

    assert isinstance(await fail_one_of_two(redis_url, fail_calls_of), OutOfMemory)
