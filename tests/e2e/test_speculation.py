"""A process fleet whose drafter is switched by the command and by the API; its answers stay the
same.
"""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.fleets import ProcessFleet, fleet_up
from tests.support import run_cli, wait_until

pytestmark = pytest.mark.one_file_in(5, "answers of processes")

NUM_STREAMS, NUM_TOKENS = 4, 48
SETTINGS = ("graph=text", "checkpoint=tiny", "numerics=invariant")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessFleet]:
    with fleet_up(tmp_path_factory.mktemp("speculation"), *SETTINGS) as running:
        yield running


def answer(fleet: ProcessFleet, number: int, **more: object) -> str:
    """Return the text of an answer, sampled with the seed `number`."""
    body = {
        "model": fleet.api.model(),
        "messages": [{"role": "user", "content": f"Question {number}: one two one two one"}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0.7,
        "seed": number,
        "fleet": {"lm": {"ignore_eos": True}},
        **more,
    }
    reply = (
        httpx.post(f"{fleet.url}/v1/chat/completions", json=body, timeout=60)
        .raise_for_status()
        .json()
    )
    return str(reply["choices"][0]["message"]["content"])


def answers(fleet: ProcessFleet) -> list[str]:
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        return list(pool.map(lambda number: answer(fleet, number), range(NUM_STREAMS)))


def drafters(fleet: ProcessFleet) -> set[str]:
    (stage,) = fleet.get("/v1/fleet/drafters")["data"]
    figures = [worker["figures"] for worker in stage["workers"]]
    return {"auto" if one["automatic"] else one["drafter"] for one in figures}


def acceptance_lengths(fleet: ProcessFleet) -> list[float | None]:
    return [
        worker["acceptance_length"]
        for worker in fleet.get("/v1/fleet/drafters")["data"][0]["workers"]
    ]


def use(fleet: ProcessFleet, drafter: str) -> None:
    result = run_cli("draft", "use", drafter, cwd=fleet.folder, env=fleet.env)
    assert result.returncode == 0, result.stderr
    wait_until(
        lambda: drafters(fleet) == {"off" if drafter == "configured" else drafter},
        f"the worker to draft with {drafter}",
    )


def test_answers_are_equal_with_every_drafter_and_the_switch_is_shown(fleet: ProcessFleet) -> None:
    expected = answers(fleet)
    for drafter in ("auto", "ngram", "suffix"):
        use(fleet, drafter)
        assert answers(fleet) == expected and answers(fleet) == expected
    wait_until(
        lambda: any((length or 0) > 1 for length in acceptance_lengths(fleet)),
        "the worker to publish its counts",
    )
    listed = run_cli("draft", "list", cwd=fleet.folder, env={**fleet.env, "COLUMNS": "200"}).stdout
    assert re.search(r"suffix +│ +[1-4]\.\d\d", listed), listed
    httpx.post(f"{fleet.url}/v1/fleet/drafters/lm/configured").raise_for_status()
    wait_until(lambda: drafters(fleet) == {"off"}, "workers to use the configured drafter")
