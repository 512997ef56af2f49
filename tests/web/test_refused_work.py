"""Limit of refused work per client address: an address that has caused seconds of it must wait, and
other addresses are served.
"""

import json

import pytest

from fleet.core.errors import Overloaded
from tests.web.bombs import CHAT, JSON
from tests.web.gateway_target import gateway_target
from tests.web.realtime.manual_clock import ManualClock
from web.http.refused_work import MAX_DEBT_S, PAID_PER_S, SMALL_S, RefusedWork

pytestmark = pytest.mark.one_file_in(3, "gateways under load")


def test_refused_work_adds_up_to_a_wait_that_its_time_pays() -> None:
    clock = ManualClock()
    work = RefusedWork(clock.now)
    for _ in range(4):
        work.check("a")
        work.add("a", MAX_DEBT_S / 4)
    work.check("a")
    work.add("a", 1.0)
    with pytest.raises(Overloaded) as refused:
        work.check("a")
    assert refused.value.retry_after_s == 1 / PAID_PER_S
    clock.advance(refused.value.retry_after_s)
    work.check("a")


def test_short_refused_work_costs_nothing_and_each_sender_pays_its_own() -> None:
    work = RefusedWork(ManualClock().now)
    for _ in range(10_000):
        work.add("a", SMALL_S / 2)
    work.add("b", 2 * MAX_DEBT_S)
    work.check("a")
    with pytest.raises(Overloaded):
        work.check("b")


def test_debts_of_few_senders_are_remembered() -> None:
    work = RefusedWork(ManualClock().now)
    work.add("first", 2 * MAX_DEBT_S)
    for number in range(5_000):
        work.add(str(number), 1.0)
    assert work.debt_s("first") == 0 and work.debt_s("4999") == 1.0


def test_address_of_refused_large_prompts_waits_while_others_are_served(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    def chat(text: str) -> bytes:
        return json.dumps(
            {"model": "omni", "messages": [{"role": "user", "content": text}]}
        ).encode()

    too_long = chat("\N{GRINNING FACE}" * 262_000)
    with gateway_target(tmp_path_factory.mktemp("target")) as target, target.sender() as attacker:
        answers = [attacker.post(CHAT, content=too_long) for _ in range(200)]
        last = answers[-1]
        assert answers[0].status_code == 400 and last.status_code == 429
        assert (
            "large inputs from this address were refused again and again"
            in last.json()["error"]["message"]
        )
        assert int(last.headers["retry-after"]) >= 1
        assert attacker.post(CHAT, content=chat("hello")).status_code == 200, (
            "small inputs are served"
        )
        assert target.post(CHAT, chat("hello world " * 1_420), JSON).status_code == 200, (
            "other addresses are served"
        )
