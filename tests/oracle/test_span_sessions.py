"""A session saved under one division of the layers continues under any other division as it would
have continued where it was.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from fleet.core.errors import BadInput
from fleet.core.ids import RequestId, StageName
from fleet.core.request import RequestSpec, Sampling
from fleet.engine.capabilities import SavedSession, SessionCopied
from fleet.graphs.qwen3_omni import THINKER
from fleet.spans.protocol.messages import SpanFetched
from fleet.stages.qwen3_omni.thinker import ThinkerAdapter, feature_extractor
from fleet.stages.stop_strings import StopDetector, tokenizer_of
from tests.capabilities import prefixes_of, sessions_of
from tests.oracle.cases import make_frontend, speech_like, user, wav_part
from tests.oracle.divided_speech import THINKERS
from tests.oracle.test_sessions import OracleConversation
from tests.oracle.test_span_engine import SMALL_QWEN, SPLITS, driven
from tests.oracle.test_text_engine import write_model
from tests.span_route import Split, TextDriver, route_of, single
from tests.span_workers import LM
from tests.support import wait_until

pytestmark = pytest.mark.one_file_in(4, "engines of one process")

FIRST = list(range(40, 73))
SECOND = [7, 8, 9, 10]
MANY = list(range(2, 202))
WHOLE = "whole"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(SMALL_QWEN, tmp_path_factory.mktemp("qwen"))


@dataclass(slots=True)
class SessionDrivers:
    """Drivers of one stage, by division; each driver has its own engine."""

    opened: ExitStack
    folder: Path
    stage: StageName
    splits: Mapping[str, Split]

    def __call__(self, layout: str) -> TextDriver:
        options: dict[str, Any] = {"numerics": "invariant", "prefill_chunk_tokens": 7}
        if layout == WHOLE:
            return single(self.folder, stage=self.stage, **options)
        return self.opened.enter_context(
            driven(self.folder, self.splits[layout], stage=self.stage, **options)
        )


@pytest.fixture
def text(folder: Path) -> Iterator[SessionDrivers]:
    with ExitStack() as opened:
        yield SessionDrivers(opened, folder, LM, SPLITS)


@pytest.fixture
def thinker(tiny_checkpoint: Path) -> Iterator[SessionDrivers]:
    with ExitStack() as opened:
        yield SessionDrivers(opened, tiny_checkpoint, THINKER, THINKERS)


def copied(driver: TextDriver) -> SessionCopied:
    """Step the engine until a session copy ends; return it."""

    def ended() -> SessionCopied | None:
        driver.turn()
        return next(iter(sessions_of(driver.engine).take_copied()), None)

    done = wait_until(ended, "the copy to end")
    assert done is not None
    return done


def saved_by(driver: TextDriver) -> SavedSession:
    driver.submit("first", FIRST, Sampling(max_tokens=6), session="s")
    driver.run()
    sessions_of(driver.engine).begin_save("s")
    saved = copied(driver).saved
    assert saved is not None and saved.num_rows > len(FIRST)
    return saved


def next_turn(driver: TextDriver, answer: list[int]) -> torch.Tensor:
    """Answer the session's next turn; return the logits of its sampled tokens."""
    driver.submit(
        "next",
        [*FIRST, *answer, *SECOND],
        Sampling(max_tokens=5, temperature=0.8, seed=3),
        session="s",
    )
    driver.run()
    return torch.stack(driver.logits["next"])


@pytest.mark.one_in(2, "saved sessions")
@pytest.mark.parametrize("layout", [WHOLE, *SPLITS])
def test_saved_session_continues_under_every_other_layout(
    text: SessionDrivers, layout: str
) -> None:
    assert_session_moves(text, layout)


@pytest.mark.one_in(2, "saved sessions of the Thinker")
@pytest.mark.parametrize("layout", [WHOLE, "forward 2", "reverse 2", "head on anchor 2"])
def test_saved_session_of_a_thinker_continues_under_every_other_layout(
    thinker: SessionDrivers, layout: str
) -> None:
    assert_session_moves(thinker, layout)


def assert_session_moves(drivers: SessionDrivers, layout: str) -> None:
    source = drivers(layout)
    saved, answer = saved_by(source), source.tokens["first"]
    expected = next_turn(source, answer)
    for other in (WHOLE, "forward 2", "reverse 2"):
        target = drivers(other)
        sessions_of(target.engine).begin_load("s", saved)
        assert copied(target).error is None
        assert torch.equal(next_turn(target, answer), expected), other
        assert target.engine.stats().kv.rows_reused >= len(FIRST)


@pytest.mark.parametrize("layout", [WHOLE, "forward 2", "reverse 2"])
def test_saved_session_has_the_tapped_rows_of_its_audio(
    thinker: SessionDrivers, layout: str, tiny_checkpoint: Path
) -> None:
    """A saved session has the tapped hidden states of its audio: its next turn sends them to the
    Talker, as the Thinker that computed them does.
    """
    frontend = make_frontend(tiny_checkpoint)
    talk = OracleConversation(frontend)
    source = thinker(layout)
    feed_turn(
        source,
        "first",
        talk.ask(user("What do you hear?", wav_part(speech_like(0.9, 2)))),
        tiny_checkpoint,
    )
    sessions_of(source.engine).begin_save("s")
    saved = copied(source).saved
    assert saved is not None and saved.tapped
    talk.answers.append(source.tokens["first"])
    second = talk.ask(user("Say it once more."))
    feed_turn(source, "second", second, tiny_checkpoint)
    expected = tapped_rows(source, "second")
    assert len(expected) == len(saved.tapped)
    for other in (WHOLE, "forward 2", "reverse 2"):
        target = thinker(other)
        sessions_of(target.engine).begin_load("s", saved)
        assert copied(target).error is None
        feed_turn(target, "second", second, tiny_checkpoint)
        assert target.engine.stats().kv.rows_reused >= len(saved.tapped)
        assert (
            target.tokens["second"] == source.tokens["second"]
            and (tapped_rows(target, "second") == expected).all()
        ), other


def feed_turn(
    driver: TextDriver, name: str, turn: tuple[RequestSpec, bytes | None], checkpoint: Path
) -> None:
    """Let a Thinker answer a turn of the session "s", with the input that its stage would feed."""
    spec, blob = replace(turn[0], session="s"), turn[1]
    stop_detector = StopDetector((), tokenizer_of(checkpoint))
    request, pieces = ThinkerAdapter(
        spec, blob, feature_extractor(checkpoint), stop_detector, lambda *_: None
    ).open()
    driver.submit_request(
        dataclasses.replace(request, request_id=RequestId(name), session="s"), pieces
    )
    driver.run()


def tapped_rows(driver: TextDriver, name: str) -> NDArray[np.float32]:
    return np.concatenate([arrays["rows"] for arrays in driver.arrays[name] if "rows" in arrays])


@pytest.mark.parametrize("layout", ["forward 2", "reverse 2"])
def test_session_is_saved_and_loaded_while_prompts_are_computed(
    text: SessionDrivers, layout: str
) -> None:
    """A session is saved and loaded while prompts are computed. Aborted requests leave passes under
    way that use pages which the loaded session gets later.
    """
    driver = text(layout)
    saved, answer = saved_by(driver), driver.tokens["first"]
    for number in range(4):
        driver.submit(f"long {number}", MANY, Sampling(max_tokens=3))
    driver.turn()
    sessions_of(driver.engine).begin_save("s")
    again = copied(driver).saved
    assert again is not None and all(
        (one == two).all() for one, two in zip(again.layers, saved.layers, strict=True)
    )
    prefixes_of(driver.engine).drop("s")
    driver.end("long 0", keep=False)
    sessions_of(driver.engine).begin_load("s", saved)
    assert copied(driver).error is None
    driver.run()
    alone = text(WHOLE)
    assert torch.equal(next_turn(driver, answer), next_turn(alone, answer))


def test_session_of_another_model_or_without_rows_is_refused(text: SessionDrivers) -> None:
    driver = text("forward 1")
    with pytest.raises(BadInput, match="no rows of the session are cached"):
        sessions_of(driver.engine).begin_save("unknown")
    saved = saved_by(driver)
    fewer = SavedSession(
        num_rows=saved.num_rows, keys=saved.keys, layers=saved.layers[:-1], layout=saved.layout
    )
    with pytest.raises(
        BadInput, match="the file has 3 layers of float32, .* this model 4 of float32"
    ):
        sessions_of(driver.engine).begin_load("s", fewer)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("layout", ["forward 2", "reverse 2"])
def test_session_is_not_saved_while_a_span_worker_lacks_its_rows(
    text: SessionDrivers, layout: str, place: int
) -> None:
    """A session is not saved while a span worker lacks its rows: loaded rows are in no log of sent
    passes, from which a replacement worker would compute them.
    """
    source = text(layout)
    saved, answer = saved_by(source), source.tokens["first"]
    driver = text(layout)
    sessions_of(driver.engine).begin_load("s", saved)
    assert copied(driver).error is None
    route = route_of(driver)
    route.worker_at[place].kill()
    wait_until(lambda: route.chain is None or route.chain.is_broken, "the loss to be noticed")
    driver.turn()
    sessions_of(driver.engine).begin_save("s")
    refused = copied(driver)
    assert refused.saved is None and refused.error is not None
    assert "this worker has 0 of the" in refused.error.message, refused.error.message
    assert torch.equal(next_turn(driver, answer), next_turn(source, answer))
    sessions_of(driver.engine).begin_save("s")
    sessions_of(source.engine).begin_save("s")
    assert_same_rows(copied(driver).saved, copied(source).saved)


@pytest.mark.parametrize("layout", ["forward 2", "reverse 2"])
def test_session_saved_after_a_loss_has_the_rows_that_are_computed_again(
    text: SessionDrivers, layout: str
) -> None:
    """A session saved after a loss has the recomputed rows. A copy that begins before they are
    recomputed is refused, and succeeds later.
    """
    driver = text(layout)
    saved = saved_by(driver)
    for worker in list(route_of(driver).worker_at):
        worker.kill()
    again: list[SavedSession] = []

    def is_saved() -> bool:
        driver.turn()
        sessions_of(driver.engine).begin_save("s")
        done = copied(driver)
        again.extend([done.saved] if done.saved is not None else [])
        return bool(again)

    wait_until(is_saved, "the session to be saved")
    assert_same_rows(again[0], saved)


def test_copy_fails_when_a_span_worker_is_lost_meanwhile(text: SessionDrivers) -> None:
    driver = text("forward 2")
    saved = saved_by(driver)
    route = route_of(driver)
    assert route.chain is not None
    route.chain.loses = lambda message: isinstance(message, SpanFetched)
    sessions_of(driver.engine).begin_save("s")
    assert not sessions_of(driver.engine).take_copied()
    route.worker_at[1].kill()
    wait_until(lambda: route.chain is None or route.chain.is_broken, "the loss to be noticed")
    (done,) = sessions_of(driver.engine).take_copied()
    assert (
        done.error is not None
        and done.error.message == "a span worker was lost during the copy; try again"
    )
    assert prefixes_of(driver.engine).num_rows("s") == saved.num_rows


@pytest.mark.parametrize("dropped", ["s", None], ids=["expired", "all dropped"])
def test_session_that_is_dropped_during_a_copy_is_not_cached_after_it(
    text: SessionDrivers, dropped: str | None
) -> None:
    driver = text("forward 2")
    saved = saved_by(driver)
    sessions_of(driver.engine).begin_save("s")
    prefixes_of(driver.engine).drop(dropped)
    assert_same_rows(copied(driver).saved, saved)
    assert (
        prefixes_of(driver.engine).num_rows("s") == 0 and driver.engine.stats().kv.pages_used == 0
    )
    sessions_of(driver.engine).begin_load("s", saved)
    prefixes_of(driver.engine).drop(dropped)
    refused = copied(driver).error
    assert refused is not None and "was dropped while it was loaded" in refused.message
    assert (
        prefixes_of(driver.engine).num_rows("s") == 0 and driver.engine.stats().kv.pages_used == 0
    )


def assert_same_rows(one: SavedSession | None, other: SavedSession | None) -> None:
    assert one is not None and other is not None and one.num_rows == other.num_rows
    assert (one.keys == other.keys).all()
    assert all((a == b).all() for a, b in zip(one.layers, other.layers, strict=True))
