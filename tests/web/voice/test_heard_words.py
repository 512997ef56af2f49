"""The Voice page in front of a gateway whose graph has a recogniser: what the user said is on the
page, and speech interrupts the answer.
"""

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from tests.e2e.talking import silence, speech
from tests.web.conftest import ServedGateway
from tests.web.fake_client import RATE_HZ, Script
from tests.web.realtime.speech_samples import QUESTION
from tests.web.voice import probe
from tests.web.voice.browsers import Browsers, js, start, visiting
from tests.web.voice.test_spoken import MAX_BARGE_IN_MS

pytestmark = pytest.mark.one_file_in(4, "pages in a browser")

HEARD, ANSWER = "What day comes after Monday?", "Tuesday comes after Monday."
TWICE = np.concatenate(
    [silence(1.0), speech(QUESTION), silence(4.0), speech(QUESTION), silence(120)]
)


def user_words(page: Page) -> list[str]:
    return page.locator(".turn.user .words").all_inner_texts()


def test_heard_words_are_shown_and_speech_interrupts_the_answer(
    browsers: Browsers, cascade_gateway: ServedGateway
) -> None:
    cascade_gateway.client.script = Script(heard=HEARD, text=ANSWER, num_samples=20 * RATE_HZ)
    browser = browsers.with_microphone("twice", TWICE)
    with visiting(browser, cascade_gateway.url, bypass_csp=True) as page:
        expect(page.locator("#state")).to_have_text("Ready")
        probe.prepare(page)
        start(page)
        probe.watch_mic(page)
        expect(page.locator(".turn.assistant.cut-off .notes").first).to_contain_text("interrupted")
        took_ms = probe.barge_in_ms(page)
        print(f"barge-in: {took_ms:.0f} ms from the first voiced sample to the last one played")
        assert 0 < took_ms <= MAX_BARGE_IN_MS
        expect(page.locator(".turn.user .words").nth(1)).to_have_text(HEARD)
        assert user_words(page) == [HEARD, HEARD]
        first, second = page.locator(".turn.assistant .words").all_inner_texts()
        assert ANSWER.startswith(first.strip()) and second.strip() == ANSWER
        assert js(page, "fleetVoice.conversation.turns.length") == 4
