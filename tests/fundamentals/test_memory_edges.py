"""Memory that is not found around a request's work: a hand-off does without its blocks, anything else costs that one request.

The worker lives, and its other requests do not notice. `test_poison` has what an engine's steps fail over.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from fleet.core.errors import FleetError, OutOfMemory
from fleet.core.ids import EdgeName, RequestId
from fleet.core.request import RequestSpec
from fleet.engine.fake import FakeEngine
from fleet.transfer.nixl import NixlTransfer
from fleet.transfer.peer_link import NixlPull
from fleet.worker import grants
from tests.harness import answer, assert_same, fake_spec, gateway, thread_fleet
from tests.storm import assert_nothing_left
from tests.support import REPO

SPLIT = REPO / "configs" / "thinker_pd.yaml"
ERRORS = [MemoryError(), RuntimeError("can't allocate memory")]
"""As Python and numpy say it, and as torch does."""


def fail_over(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, error: Exception, concerns: Callable[..., bool]
) -> list[str]:
    """From now on the calls that `concerns` picks by their arguments raise; returns where each is noted."""
    do, met = getattr(owner, name), list[str]()

    def scarce(*args: Any, **named: Any) -> object:
        if concerns(*args):
            met.append(name)
            raise error
        return do(*args, **named)

    monkeypatch.setattr(owner, name, scarce)
    return met


def everywhere(*_args: object) -> bool:
    return True


def of_blocks(_transfer: NixlTransfer, owner: RequestId, *_tensor: object) -> bool:
    return owner.endswith("/kv")


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    ("owner", "name", "concerns"),
    [
        (FakeEngine, "lend_pages", everywhere),
        (FakeEngine, "export_kv", everywhere),
        (NixlTransfer, "publish", of_blocks),
        (NixlPull, "poll", everywhere),
        (FakeEngine, "import_kv", everywhere),
    ],
    ids=["lend_pages", "export_kv", "publish", "pull", "import_kv"],
)
async def test_hand_off_without_memory_recomputes_the_prefix(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, concerns: Callable[..., bool], error: Exception
) -> None:
    if name == "lend_pages":  # which is asked for only where a pool is shared
        monkeypatch.setattr(NixlTransfer, "shares_memory", True)
    with thread_fleet(redis_url, file=SPLIT, transfer="nixl") as fleet:
        async with gateway(fleet) as client:
            expected = await answer(client, fake_spec(fleet))
            met = fail_over(monkeypatch, owner, name, error, concerns)
            for _ in range(2):
                assert_same(await answer(client, fake_spec(fleet)), expected)
        assert len(met) >= 2 and not fleet.killed, "the workers live"
        assert_nothing_left(fleet)


async def ask_beside_a_mate(url: str, strike: Callable[[RequestId], list[str]]) -> FleetError:
    """What a request ends with that is short of memory; its mate is answered as without it."""
    with thread_fleet(url, transfer="nixl") as fleet:
        async with gateway(fleet) as client:
            expected = await answer(client, fake_spec(fleet))
            spec, mate = fake_spec(fleet), fake_spec(fleet)
            met = strike(spec.id)

            async def ask(spec: RequestSpec) -> FleetError:
                with pytest.raises(FleetError) as caught:
                    await answer(client, spec)
                return caught.value

            failed, heard = await asyncio.gather(ask(spec), answer(client, mate))
            assert_same(heard, expected)
            assert_same(await answer(client, fake_spec(fleet)), expected)
        assert met and not fleet.killed, "the workers live"
        assert_nothing_left(fleet)
    return failed


async def test_chunk_without_memory_fails_its_request(redis_url: str, monkeypatch: pytest.MonkeyPatch, pulled: EdgeName) -> None:
    def strike(request: RequestId) -> list[str]:
        return fail_over(monkeypatch, NixlTransfer, "publish", MemoryError(), lambda _transfer, owner, *_: owner == request)

    assert isinstance(await ask_beside_a_mate(redis_url, strike), OutOfMemory), pulled


async def test_replayed_logs_without_memory_fail_their_request(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def strike(request: RequestId) -> list[str]:
        return fail_over(monkeypatch, grants, "parse_claim", MemoryError(), lambda reply, *_: request.encode() in reply[1])

    assert isinstance(await ask_beside_a_mate(redis_url, strike), OutOfMemory)
