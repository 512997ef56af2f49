"""The panel As code of the Voice page: its programs do what was done on the page, against the same
gateway.
"""

import base64
import io
import json
import shutil
import subprocess
import sys
import wave
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.support import wait_until
from tests.tool_template import WEATHER
from tests.web.conftest import KEY, Loaded, ServedGateway, serving
from tests.web.fake_client import RATE_HZ, Script
from tests.web.realtime.speech_samples import question
from tests.web.voice.browsers import Browsers, ask, choose, js, visiting

pytestmark = pytest.mark.one_file_in(4, "pages in a browser")

QUESTION = "What's \"hot\"?\n$HOME \\n `date` 'x' 🙂"
"""Every character that a shell, Python or JavaScript may take for its own."""
VOICE = "chelsie"
TOOL = {"type": "function", **WEATHER["function"]}
PLACEHOLDER = "YOUR_API_KEY"


@pytest.fixture(scope="module")
def locked_gateway(tooled: Loaded) -> Iterator[ServedGateway]:
    """A gateway that requires the API key `KEY`, with a model that speaks and calls functions."""
    with serving(tooled, KEY) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def programs(
    tmp_path_factory: pytest.TempPathFactory, locked_gateway: ServedGateway
) -> dict[str, str]:
    """The programs that the page shows: of a typed question; of a spoken one, with "spoken" before
    their names, and of one that ends without turn detection ("committed").
    """
    with (
        Browsers.started(tmp_path_factory.mktemp("sounds")) as browsers,
        visiting(browsers.with_microphone("nothing", None), locked_gateway.url) as page,
    ):
        page.locator("input[type=password]").fill(KEY)
        page.locator("form button").click()
        expect(page.locator("#state")).to_have_text("Ready")
        choose(page, "voice", VOICE)
        page.locator("#session-fold > summary").click()
        for field, text in (("instructions", "Say it's so."), ("tools", json.dumps([TOOL]))):
            page.locator(f"#{field}").fill(text)
            page.locator(f"#{field}").blur()
        page.locator("#session-fold > summary").click()
        ask(page, QUESTION)
        expect(page.locator(".turn.assistant .words")).not_to_be_empty()
        page.locator("#code-fold > summary").click()
        typed = read_programs(page)
        js(page, "Object.assign(fleetVoice.conversation.turns[0], { kind: 'speech' })")
        spoken = {f"spoken {name}": program for name, program in read_programs(page).items()}
        choose(page, "turns", "none")
        committed = {f"committed {name}": program for name, program in read_programs(page).items()}
    return {**typed, **spoken, **committed}


def read_programs(page: Page) -> dict[str, str]:
    programs: dict[str, str] = {}
    for language in ("curl", "python", "javascript"):
        page.locator("#language").select_option(language)
        programs[language] = page.locator("#code").inner_text()
    return programs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with wave.open(str(tmp_path / "question.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE_HZ)
        file.writeframes(question())
    return tmp_path


def run(command: list[str], program: str, folder: Path) -> str:
    assert PLACEHOLDER in program and f'"{KEY}"' not in program and f" {KEY}" not in program
    program = program.replace(PLACEHOLDER, KEY)
    done = subprocess.run(
        [*command, "-"],
        input=program,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_asked(gateway: ServedGateway, kind: str) -> None:
    """Check that the gateway was asked for what was done on the page."""
    spec = next(spec for spec, _ in gateway.client.submitted if "audio" in spec.outputs)
    prompt = gateway.client.tokenizer.decode(spec.prompt_ids, skip_special_tokens=False)
    assert "Say it's so." in prompt and "get_weather" in prompt and spec.params["voice"] == VOICE
    assert (QUESTION in prompt) is (kind == "") and ("<|audio_start|>" in prompt) is (kind != "")


@pytest.fixture
def answering(locked_gateway: ServedGateway, programs: dict[str, str]) -> ServedGateway:
    locked_gateway.client.reset()
    locked_gateway.client.script = Script(num_samples=RATE_HZ)
    return locked_gateway


@pytest.mark.parametrize("kind", ["", "spoken ", "committed "])
def test_python_does_what_was_done(
    answering: ServedGateway, programs: dict[str, str], folder: Path, kind: str
) -> None:
    printed = run([sys.executable], programs[f"{kind}python"], folder)
    assert printed == Script().text
    with wave.open(str(folder / "answer.wav")) as file:
        assert (file.getframerate(), file.getnframes()) == (RATE_HZ, RATE_HZ)
    assert_asked(answering, kind)


@pytest.mark.parametrize("kind", ["", "spoken "])
def test_curl_does_what_was_done(
    answering: ServedGateway, programs: dict[str, str], folder: Path, kind: str
) -> None:
    message = json.loads(run(["sh"], programs[f"{kind}curl"], folder))["choices"][0]["message"]
    assert message["audio"]["transcript"] == Script().text
    with wave.open(io.BytesIO(base64.b64decode(message["audio"]["data"]))) as file:
        assert file.getnframes() == RATE_HZ
    assert_asked(answering, kind)


@pytest.mark.parametrize("kind", ["", "spoken "])
def test_javascript_does_what_was_done(
    answering: ServedGateway, programs: dict[str, str], folder: Path, kind: str
) -> None:
    """Node has WebSocket from version 22 on, and before that behind an option. A browser runs the
    program of the typed question; files are Node's.
    """
    program, node = programs[f"{kind}javascript"], shutil.which("node")
    if node is not None:
        printed = run([node, "--experimental-websocket", "--input-type=module"], program, folder)
        assert printed.startswith(f"{Script().text} (")
        assert_asked(answering, kind)
        answering.client.reset()
        answering.client.script = Script(num_samples=RATE_HZ)
    if not kind:
        run_in_browser(answering, program, folder)
        assert_asked(answering, kind)


def run_in_browser(gateway: ServedGateway, program: str, folder: Path) -> None:
    with (
        Browsers.started(folder) as browsers,
        visiting(browsers.with_microphone("nothing", None), gateway.url) as page,
    ):
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.evaluate(f"() => {{ {program.replace(PLACEHOLDER, KEY)} }}")
        wait_until(lambda: page.evaluate("1") and said, "the program's output")
    assert said[0].startswith(f"{Script().text} (")
