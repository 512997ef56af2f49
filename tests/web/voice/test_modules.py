"""JavaScript modules of the Voice page, each tested alone in the browser: latency, states, echo,
heard text, saved conversation.
"""

import json
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import soundfile
from playwright.sync_api import Page

from tests.support import wait_until
from tests.web.voice.browsers import MIC_RATE_HZ, Visit, ask, js, start, wait_js
from tests.web.voice.fake_server import RATE_HZ, TEXT, FakeVoiceServer, VoiceScript, tone

pytestmark = pytest.mark.one_file_in(4, "pages in a browser")

FLAGS = (
    "{refused: false, connected: true, everConnected: true, queued: 0, interrupted: false, "
    "hearing: false, playing: false, "
    "thinking: false, mic: false, muted: false, pushToTalk: false"
)


def module(page: Page, name: str, expression: str) -> object:
    return js(page, f"import('/static/voice/{name}.js').then((m) => {expression})")


def state(page: Page, **facts: object) -> object:
    return module(page, "status", f"m.findState({{...{FLAGS}}}, ...{json.dumps(facts)}}}).label")


def test_state_priority(module_page: Page) -> None:
    assert state(module_page) == "Ready"
    assert state(module_page, mic=True) == "Listening"
    assert state(module_page, mic=True, pushToTalk=True) == "Hold to talk"
    assert state(module_page, mic=True, muted=True) == "Muted"
    assert state(module_page, mic=True, thinking=True) == "Thinking"
    # audio that plays has priority over an answer in progress
    assert state(module_page, mic=True, thinking=True, playing=True) == "Speaking"
    assert state(module_page, mic=True, playing=True, hearing=True) == "Hearing you"
    assert state(module_page, hearing=True, interrupted=True) == "Interrupted"
    assert state(module_page, queued=2, mic=True) == "Waiting in line: place 2"
    assert state(module_page, connected=False, playing=True) == "Reconnecting"
    assert state(module_page, connected=False, everConnected=False) == "Connecting"
    assert state(module_page, connected=False, refused=True) == "Not connected"


def test_latency_parts_add_up(module_page: Page) -> None:
    timing = (
        "{voice_to_voice_ms: 630, parts: [{name: 'endpointing', ms: 500}, {name: 'a', ms: 130}]}"
    )
    turn = f"{{endedAt: 1000, firstAudioAt: 1650, audibleAt: 1760, timing: {timing}}}"
    latency = cast("dict[str, object]", module(module_page, "latency", f"m.computeLatency({turn})"))
    parts = {part["name"]: part["ms"] for part in cast("list[dict[str, object]]", latency["parts"])}
    assert (
        parts == {"endpointing": 500, "a": 130, "network": 20, "buffer": 110}
        and latency["totalMs"] == 760
    )
    unknown = turn.replace("endedAt: 1000", "endedAt: null")
    latency = cast(
        "dict[str, object]", module(module_page, "latency", f"m.computeLatency({unknown})")
    )
    assert latency["totalMs"] == 740
    # the server's parts already include 400 ms of silence after the first audio
    silent = turn.replace("ms: 130}", "ms: 130}, {name: 'silence', ms: 400}").replace(
        "endedAt", "silenceMs: 400, endedAt"
    )
    latency = cast(
        "dict[str, object]", module(module_page, "latency", f"m.computeLatency({silent})")
    )
    assert latency["totalMs"] == 1160
    assert module(
        module_page, "latency", "[m.median([]), m.median([3, 1, 2]), m.median([4, 1])]"
    ) == [None, 2, 2.5]


def test_end_reason_distinguishes_idle_and_operator(module_page: Page) -> None:
    idle = "{code: 1000, reason: 'invalid_request_error.session_idle: nothing was sent'}"
    assert (
        module(module_page, "reasons", f"m.refusedReason({idle}).title")
        == "This conversation was idle for too long"
    )
    operator = "{code: 1000, reason: 'an operator ended the session'}"
    assert (
        module(module_page, "reasons", f"m.refusedReason({operator}).title")
        == "An operator ended this conversation"
    )


@pytest.mark.parametrize(
    ("ms_ago", "counted"), [(100, False), (600, True), (800, True), (1000, False), (5000, False)]
)
def test_interruption_counts_as_echo_only_after_first_voiced_sample(
    module_page: Page, ms_ago: int, counted: bool
) -> None:
    """An interruption counts as echo only after the answer's first voiced sample. The answer became
    audible `ms_ago`, and its first voiced sample comes 400 ms later.
    """
    answer = f"{{live: true, silenceMs: 400, audibleAt: performance.now() - {ms_ago}}}"
    found = module(
        module_page,
        "echo-detector",
        f"((e) => [e.onInterruption({answer}), e.count])(new m.EchoDetector({{settings: {{}}}}))",
    )
    assert found == [counted, int(counted)]


@pytest.mark.parametrize(("length_ms", "warned"), [(700, True), (2500, False)])
def test_speech_longer_than_an_echo_withdraws_the_warning(
    module_page: Page, length_ms: int, warned: bool
) -> None:
    view = "{shown: false, showReason(reason) { this.shown = reason !== null; }}"
    answer = "{live: true, silenceMs: 0, audibleAt: performance.now() - 100}"
    turn = f"e.onSpeechEnd({{lengthMs: {length_ms}, maybeEcho: e.onInterruption({answer})}})"
    detector = f"new m.EchoDetector({{settings: {{}}, view: {view}}})"
    assert (
        module(
            module_page,
            "echo-detector",
            f"((e) => {{ {turn}; {turn}; return e.view.shown; }})({detector})",
        )
        == warned
    )


@pytest.mark.parametrize(
    ("answer", "ended", "mic", "count"),
    [
        ("audibleAt: now - 2000", False, "on: true", 0),
        ("audibleAt: now - 400", False, "on: true", 2),
        ("audibleAt: now - 2000, cut: true", False, "on: true", 2),
        ("audibleAt: now - 700", False, "on: true", 2),
        ("audibleAt: now - 700", True, "on: true", 0),
        ("audibleAt: now - 2000", False, "on: true, muted: true", 2),
        ("audibleAt: now - 2000", False, "on: false", 2),
    ],
)
def test_uninterrupted_answer_withdraws_the_echo_warning(
    module_page: Page, answer: str, ended: bool, mic: str, count: int
) -> None:
    view = "{shown: true, showReason(reason) { this.shown = reason !== null; }}"
    detector = (
        f"Object.assign(new m.EchoDetector({{settings: {{}}, mic: {{{mic}}}, view: "
        f"{view}}}), {{count: 2}})"
    )
    call = f"e.onPlayback({{silenceMs: 0, {answer}}}, {json.dumps(ended)}, false)"
    found = module(
        module_page,
        "echo-detector",
        f"((e, now) => {{ {call}; return [e.count, e.view.shown]; }})({detector}, "
        "performance.now())",
    )
    assert found == [count, count > 0]


def test_sent_audio_maps_positions_to_times(module_page: Page) -> None:
    sent = (
        "(() => { const s = new m.SentAudio(); s.add(20, 1020); s.add(20, 1041); s.add(20, "
        "5000); return s; })()"
    )
    assert module(
        module_page, "latency", f"[10, 20, 40, 60, 61].map((ms) => {sent}.timeAt(ms))"
    ) == [
        1010,
        1020,
        1041,
        5000,
        None,
    ]


def test_frames_with_repeats_and_gaps_are_joined(module_page: Page) -> None:
    """Frames are joined by the server's positions: a repetition is dropped, and a gap becomes
    silence.
    """
    frames = "[[0, [1, 2, 3]], [2, [3, 4]], [0, [1, 2]], [6, [7]]]"
    taken = f"{frames}.map(([at, pcm]) => [...a.acceptFrame(at, Int16Array.from(pcm))])"
    joined = module(
        module_page, "answer", f"((a) => [{taken}, a.received])(new m.Answer('r', 1, 24000))"
    )
    assert joined == [[[1, 2, 3], [4], [], [0, 0, 7]], 7]


def test_heard_text_follows_playback_by_words(module_page: Page) -> None:
    fields = "{text: 'one two three four', received: 1000, audioDone: true}"
    heard = (
        "[0, 250, 500, 999, 1000].map((played) => Object.assign(a, {played}) && "
        "a.text.slice(0, a.heardChars))"
    )
    found = module(
        module_page,
        "answer",
        f"((a) => {heard})(Object.assign(new m.Answer('r', 1, 24000), {fields}))",
    )
    assert found == ["", "one", "one two", "one two three", "one two three four"]


def test_heard_text_is_exact_where_the_voice_tells_its_words(module_page: Page) -> None:
    """Words are announced with their audio, and again after a reconnect; the server counts
    characters, of which JavaScript has two for an emoji.
    """
    fields = "{text: '\U0001f600 one two', received: 1000}"
    told = "a.addWords([[2, 0], [6, 400]]), a.addWords([[2, 0], [6, 400], [9, 900]])"
    heard = (
        "[0, 399, 400, 899, 900].map((played) => Object.assign(a, {played}) && "
        "a.text.slice(0, a.heardChars))"
    )
    found = module(
        module_page,
        "answer",
        f"((a) => ({told}, {heard}))(Object.assign(new m.Answer('r', 1, 24000), {fields}))",
    )
    face = "\U0001f600 "
    assert found == [face, face, face + "one ", face + "one ", face + "one two"]


def test_saved_conversation_has_two_tracks_and_transcript(
    visit_with_mic: Visit, server: FakeVoiceServer, tmp_path: Path
) -> None:
    """A saved conversation has the user on the left channel and the model on the right, on one
    clock, and a transcript; audio that was not played is left out.
    """
    question = tone(0.6, 700.0, MIC_RATE_HZ, 0.4)
    quiet = np.zeros(MIC_RATE_HZ, np.int16)
    server.script = VoiceScript(samples=tone(1.0, 440.0))
    page = visit_with_mic("saved", np.concatenate([quiet, question, *[quiet] * 60]))
    start(page)
    wait_js(page, f"fleetVoice.player.totalPlayed === {RATE_HZ} && !fleetVoice.player.playing")
    server.script = VoiceScript(samples=tone(10.0, 440.0))
    ask(page, "and more?")
    wait_js(page, f"fleetVoice.player.totalPlayed > {2 * RATE_HZ}")
    page.locator("#stop").click()
    wait_js(page, "!fleetVoice.player.playing")
    played = int(str(js(page, "fleetVoice.player.totalPlayed")))
    wait_until(lambda: server.of_type("conversation.item.truncate"), "the truncation")
    page.locator("#choices summary").click()
    saved: list[Path] = []
    page.on("download", lambda download: saved.append(_keep(download, tmp_path)))
    page.locator("#download").click()
    wait_until(lambda: page.evaluate("1") and len(saved) == 2, "both files")
    saved_json = json.loads(next(path for path in saved if path.suffix == ".json").read_text())
    assert [turn["role"] for turn in saved_json["turns"]] == [
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert (
        saved_json["turns"][0]["text"] == "what the user said"
        and saved_json["turns"][1]["heard"] == TEXT
    )
    assert saved_json["turns"][3]["interrupted"] and saved_json["turns"][3]["text"].startswith(
        saved_json["turns"][3]["heard"]
    )
    tracks, rate_hz = soundfile.read(
        str(next(path for path in saved if path.suffix == ".wav")), dtype="int16"
    )
    assert rate_hz == RATE_HZ and tracks.shape[1] == 2
    right = tracks[:, 1]
    assert np.count_nonzero(right) > 0.95 * played and np.count_nonzero(right) <= played
    spoken = np.flatnonzero(np.abs(tracks[:, 0]) > 2000)
    answered = np.flatnonzero(np.abs(right) > 2000)
    assert 0 < (answered[0] - spoken[-1]) / RATE_HZ < 2


def _keep(download: object, folder: Path) -> Path:
    path = folder / download.suggested_filename  # pyright: ignore
    download.save_as(path)  # pyright: ignore
    return path
