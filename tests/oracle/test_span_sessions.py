"""A session saved under one division of the layers continues under any other as it would have continued where it was."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from fleet.core.errors import BadInput
from fleet.core.request import Sampling
from fleet.engine.base import SavedSession, SessionCopied
from tests.oracle.test_span_engine import SMALL_QWEN, SPLITS, driven
from tests.oracle.test_text_engine import write_model
from tests.span_route import TextDriver, single
from tests.support import wait_until

FIRST = list(range(40, 73))
SECOND = [7, 8, 9, 10]
MANY = list(range(2, 202))
LAYOUTS = ("whole", *SPLITS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(SMALL_QWEN, tmp_path_factory.mktemp("qwen"))


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def driver_of(opened: ExitStack, folder: Path, layout: str) -> TextDriver:
    options: dict[str, Any] = {"numerics": "invariant", "prefill_chunk_tokens": 7}
    if layout == "whole":
        return single(folder, **options)
    return opened.enter_context(driven(folder, SPLITS[layout], **options))


def copied(driver: TextDriver) -> SessionCopied:
    """Return the copy that ends next, while the engine runs."""

    def ended() -> SessionCopied | None:
        driver.turn()
        return next(iter(driver.engine.take_copied()), None)

    done = wait_until(ended, "the copy to end")
    assert done is not None
    return done


def saved_by(driver: TextDriver) -> SavedSession:
    driver.submit("first", FIRST, Sampling(max_tokens=6), session="s")
    driver.run()
    driver.engine.begin_save("s")
    saved = copied(driver).saved
    assert saved is not None and saved.num_rows > len(FIRST)
    return saved


def next_turn(driver: TextDriver, answer: list[int]) -> torch.Tensor:
    """Return the logits of the next turn's draws."""
    driver.submit("next", [*FIRST, *answer, *SECOND], Sampling(max_tokens=5, temperature=0.8, seed=3), session="s")
    driver.run()
    return torch.stack(driver.logits["next"])


@pytest.mark.parametrize("layout", [pytest.param(each, marks=pytest.mark.one_in(2, "saved sessions")) for each in LAYOUTS])
def test_saved_session_continues_under_every_other_layout(opened: ExitStack, folder: Path, layout: str) -> None:
    source = driver_of(opened, folder, layout)
    saved, answer = saved_by(source), source.tokens["first"]
    expected = next_turn(source, answer)
    for other in ("whole", "forward 2", "reverse 2"):
        target = driver_of(opened, folder, other)
        target.engine.begin_load("s", saved)
        assert copied(target).error is None
        assert torch.equal(next_turn(target, answer), expected), other
        assert target.engine.stats().rows_reused >= len(FIRST)


@pytest.mark.parametrize("layout", ["forward 2", "reverse 2"])
def test_session_is_saved_and_loaded_while_prompts_are_computed(opened: ExitStack, folder: Path, layout: str) -> None:
    """Aborted requests leave passes under way that use pages which the loaded session then has."""
    driver = driver_of(opened, folder, layout)
    saved, answer = saved_by(driver), driver.tokens["first"]
    for number in range(4):
        driver.submit(f"long {number}", MANY, Sampling(max_tokens=3))
    driver.turn()
    driver.engine.begin_save("s")
    again = copied(driver).saved
    assert again is not None and all((one == two).all() for one, two in zip(again.layers, saved.layers, strict=True))
    driver.engine.drop_cached("s")
    driver.end("long 0", keep=False)
    driver.engine.begin_load("s", saved)
    assert copied(driver).error is None
    driver.run()
    alone = driver_of(opened, folder, "whole")
    assert torch.equal(next_turn(driver, answer), next_turn(alone, answer))


def test_session_of_another_model_or_without_rows_is_refused(opened: ExitStack, folder: Path) -> None:
    driver = driver_of(opened, folder, "forward 1")
    with pytest.raises(BadInput, match="no rows of the session are cached"):
        driver.engine.begin_save("unknown")
    saved = saved_by(driver)
    fewer = SavedSession(num_rows=saved.num_rows, keys=saved.keys, layers=saved.layers[:-1], layout=saved.layout)
    with pytest.raises(BadInput, match="the file has 3 layers of float32, .* this model 4 of float32"):
        driver.engine.begin_load("s", fewer)
