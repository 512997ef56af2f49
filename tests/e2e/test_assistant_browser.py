"""The Voice page in Chromium with a real recogniser, language model and voice: real words on the
page, and an interruption.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.e2e.assistant import (
    ANSWER,
    QUESTION,
    STORY,
    assistant_fleet,
    build_weights,
    spoken_question,
)
from tests.e2e.talking import VoiceFleet, answers, interrupt, microphone
from tests.e2e.test_voice_browser import assert_played_completely, wait_until_played
from tests.web.voice import probe
from tests.web.voice.browsers import Browsers
from tests.web.voice.probe import Pcm
from tests.web.voice.test_spoken import MAX_BARGE_IN_MS

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def fleet(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[VoiceFleet]:
    cache = pytestconfig.cache
    assert cache is not None, "pytest runs without its cache"
    weights = build_weights(Path(cache.mkdir("whisper_base")).parent)
    with assistant_fleet(tmp_path_factory.mktemp("fleet"), weights) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def question(fleet: VoiceFleet) -> Pcm:
    return spoken_question(fleet.api, QUESTION)


@pytest.fixture(scope="module")
def browsers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browsers]:
    with Browsers.started(tmp_path_factory.mktemp("sounds")) as browsers:
        yield browsers


def test_spoken_question_and_answer_are_real_words_on_the_page(
    browsers: Browsers, fleet: VoiceFleet, question: Pcm
) -> None:
    with microphone(browsers, fleet, question) as page:
        page.locator("#talk-button").click()
        expect(page.locator(".turn.user .words")).to_have_text(QUESTION)
        expect(page.locator(".turn.assistant .words")).to_contain_text(ANSWER)
        expect(page.locator(".turn.assistant .latency")).to_be_visible()
        wait_until_played(page)
        (answer,) = answers(page)
        assert_played_completely(page, fleet, answer)


def test_barge_in_silences_the_assistant(
    browsers: Browsers, fleet: VoiceFleet, question: Pcm
) -> None:
    with microphone(browsers, fleet, question) as page:
        interrupt(page, STORY)
        took_ms = probe.barge_in_ms(page)
        print(f"barge-in: {took_ms:.0f} ms from the first voiced sample to the last one played")
        assert 0 < took_ms <= MAX_BARGE_IN_MS
        expect(page.locator(".turn.user .words").last).to_have_text(QUESTION)
        expect(page.locator(".turn.assistant .words").nth(1)).to_contain_text(ANSWER)
