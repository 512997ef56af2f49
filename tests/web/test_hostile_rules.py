"""Rules for answers that are costly, endless or impossible: each is served, or refused by the name
of its field, in bounded memory and outside of the event loop.
"""

import json
from collections.abc import Callable, Iterator

import pytest

from fleet.constraints.rules import Constraints
from fleet.processing.tokenizer import load_tokenizer
from tests.web.bombs import CHAT, MIB
from tests.web.bombs import JSON as JSON_TYPE
from tests.web.conftest import ASK, Loaded
from tests.web.gateway_target import GatewayTarget, gateway_target
from tests.web.hostile_rules import RULES, Fields
from web.schema.chat import parse_chat

pytestmark = pytest.mark.one_file_in(2, "gateways under load")

MAX_GROWTH_BYTES = 100 * MIB


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayTarget]:
    with gateway_target(tmp_path_factory.mktemp("target")) as target:
        yield target


@pytest.mark.timeout(120)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_hostile_rule_is_served_or_refused_by_name(
    target: GatewayTarget,
    loaded: Loaded,
    rule: Fields,
    record_property: Callable[[str, object], None],
) -> None:
    """The longest stall of the event loop is reported in the test's properties."""
    body = json.dumps({**ASK, **rule}).encode()
    start = target.mark()
    target.longest_stall_s()
    answer = target.post(CHAT, body, JSON_TYPE)
    record_property("longest_stall_ms", round(1000 * target.longest_stall_s(), 1))
    assert target.growth(start) < 4 * len(body) + MAX_GROWTH_BYTES
    if answer.status_code == 200:
        check_worker_begins(loaded, body)
        return
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] in rule and error["message"].startswith(error["param"]), error


def check_worker_begins(loaded: Loaded, body: bytes) -> None:
    """Check that a worker can begin the answer to a chat by its rule."""
    found = parse_chat(body).rule
    assert found is not None
    tokenizer = load_tokenizer(loaded.checkpoint)
    constraints = Constraints(
        lambda: tokenizer, tokenizer.get_vocab_size(), loaded.frontend.end_ids()
    )
    begin = constraints.compile(found.constraint, 256)
    assert begin is not None
    rule = begin()
    allowed = rule.allowed([])
    assert rule.error is None and allowed is not None and allowed.any()
