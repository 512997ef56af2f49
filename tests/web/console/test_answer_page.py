"""The page of one answer, the comparison of two, and the bundle for a bug report, in a gateway over
answers whose times are known.
"""

import io
import json
import re
import zipfile

import msgspec
import pytest

from fleet.core.clock import now_us
from fleet.telemetry.trace import RequestTrace
from fleet.telemetry.views import WorkerView
from tests.web.build import build
from tests.web.conftest import ServedGateway, request_id_of
from tests.web.console import html_audit
from tests.web.fake_telemetry import FakeTelemetry
from tests.web.plausible_answers import NAMES, OTHER, TALKER, WORDS, add_answers
from web.console.bundle import public_body

SECRET_KEY, SECRET_SESSION = "alice-laptop", "5f0c" * 8


@pytest.fixture
def answers(gateway: ServedGateway) -> dict[str, RequestTrace]:
    telemetry = FakeTelemetry()
    gateway.client.show(telemetry)
    return add_answers(telemetry, gateway.client.tokenizer.encode("Hot is not cold.").ids)


def page_of(gateway: ServedGateway, path: str, status: int = 200) -> str:
    answer = gateway.http.get(path)
    assert answer.status_code == status, answer.text[:500]
    assert not (faults := html_audit.read(answer.text).faults), faults
    assert len(answer.content) < 100_000
    return answer.text


def shown(page: str) -> str:
    return " ".join(" ".join(html_audit.read(page).text).split())


@pytest.mark.parametrize(
    ("name", "begin"),
    [
        ("fine", "Fine: first sound after 660 ms from the end of your speech, 12 s of speech"),
        ("slow", "Slow: talker took 110 ms for each 80 ms of sound; 5 in its batch"),
        ("interrupted", "Interrupted by a death: talker@a:2:0b died after 1.2 s"),
        ("failed", "Failed: the engine failed the request"),
    ],
)
def test_page_begins_with_the_verdict(
    gateway: ServedGateway, answers: dict[str, RequestTrace], name: str, begin: str
) -> None:
    page = page_of(gateway, f"/requests/{answers[name].id}")
    assert f'class="verdict verdict-{name}"' in page
    text = re.sub(r"<[^>]+>", "", page.partition('class="verdict')[2].partition(">")[2])
    assert text.startswith(begin)
    lanes = re.findall(r'id="lane-([^"]+)"', page)
    assert lanes[:4] == ["you", "answer", "flow", "request"]
    assert WORDS.split()[0] in page and 'class="shape-heard"' in page


def test_cause_of_a_death_is_told_while_the_worker_is_listed(
    gateway: ServedGateway, answers: dict[str, RequestTrace]
) -> None:
    gateway.client.telemetry.worker_list = [
        build(WorkerView, id=OTHER, role=TALKER, state="died", ended_us=1, cause="SIGKILL")
    ]
    page = page_of(gateway, f"/requests/{answers['interrupted'].id}")
    assert "died (SIGKILL) after 1.2 s" in page and f'href="/workers/{OTHER}"' in page.replace(
        "%40", "@"
    ).replace("%3A", ":")


def test_sound_is_drawn_only_while_it_is_stored(
    gateway: ServedGateway, answers: dict[str, RequestTrace]
) -> None:
    request = answers["fine"].id
    stored = page_of(gateway, f"/requests/{request}")
    assert 'class="shape-heard"' in stored and "span-word" in stored
    del gateway.client.telemetry.edge_logs[request, "audio"]
    page = page_of(gateway, f"/requests/{request}")
    assert 'class="shape-heard"' not in page and "the sound is not stored" in page
    assert "span-word" not in page, "nor its words"


@pytest.mark.parametrize(("pause_us", "num_gaps"), [(80_000, 0), (500_000, 2)])
def test_gateway_notes_the_gaps_in_the_sound_that_it_delivers(
    gateway: ServedGateway, pause_us: int, num_gaps: int
) -> None:
    """The verdict stays the same once the times of the chunks are deleted with the sound."""
    script = gateway.client.script
    script.num_samples = 3 * script.samples_per_chunk
    begun_us = now_us()
    script.made_us = [begun_us + number * pause_us for number in range(3)]
    answer = gateway.create(
        modalities=["text", "audio"], audio={"voice": "ethan", "format": "pcm16"}
    )
    request = request_id_of(answer)
    gaps = gateway.client.telemetry.gaps[request]
    assert (gaps.num, gaps.longest_us) == (num_gaps, pause_us - 80_000 if num_gaps else 0)
    before = verdict_of(page_of(gateway, f"/requests/{request}"))
    assert before and "Complete" not in before
    del gateway.client.telemetry.edge_logs[request, "audio"]
    assert verdict_of(page_of(gateway, f"/requests/{request}")) == before


def verdict_of(page: str) -> str:
    return re.sub(r"<[^>]+>", "", page.partition('class="verdict')[2].partition("</p>")[0])


def test_conversation_leads_to_its_other_answers(
    gateway: ServedGateway, answers: dict[str, RequestTrace]
) -> None:
    path = f"/requests?session={answers['fine'].session}"
    assert f'href="{path}"' in page_of(gateway, f"/requests/{answers['fine'].id}")
    assert page_of(gateway, path).count('<tr id="r-') == len(NAMES)
    assert page_of(gateway, "/requests?session=other").count('<tr id="r-') == 0


def test_page_speaks_plainly(gateway: ServedGateway, answers: dict[str, RequestTrace]) -> None:
    text = shown(page_of(gateway, f"/requests/{answers['fine'].id}")).lower()
    assert "audio codes" in text and "delivery" in text and "phase" in text
    for word in ("walk", "hop", "receipt", "underrun"):
        assert not re.search(rf"\b{word}", text), word


def test_comparison_shows_both_answers_on_one_axis(
    gateway: ServedGateway, answers: dict[str, RequestTrace]
) -> None:
    slow, fine = answers["slow"].id, answers["fine"].id
    page = page_of(gateway, f"/requests/{slow}/compare?with={fine}")
    assert page.index('class="verdict verdict-slow"') < page.index('class="verdict verdict-fine"')
    labels = re.findall(r'<svg class="axis.*?</svg>', page)
    assert len(labels) == 2 and labels[0] == labels[1]
    groups = re.findall(r'scope="rowgroup">(?:<[^>]*>)*([\w ]+)', page)
    assert groups[0] == "Whole answer" and groups[-1] == "thinker", "the least difference is last"
    assert "−3" in shown(page), "dropouts"
    assert "The second answer is the median" not in page


def test_comparison_chooses_the_median_of_the_hour(
    gateway: ServedGateway, answers: dict[str, RequestTrace]
) -> None:
    page = page_of(gateway, f"/requests/{answers['failed'].id}/compare")
    assert "The second answer is the median of its hour" in page
    finished = [trace.id for name, trace in answers.items() if name != "failed"]
    (other,) = re.findall(r'name="with" value="([^"]*)"', page)
    assert other in finished
    gateway.client.telemetry.rows = [
        row for row in gateway.client.telemetry.rows if row.id == answers["failed"].id
    ]
    alone = page_of(gateway, f"/requests/{answers['failed'].id}/compare")
    assert "No other finished answer of this kind" in alone


def test_median_is_taken_by_the_first_output_of_the_same_kind(
    gateway: ServedGateway, answers: dict[str, RequestTrace]
) -> None:
    telemetry = gateway.client.telemetry
    wanted = answers["fine"].id
    for name, first_ms in (("slow", 100), ("fine", 200), ("interrupted", 300)):
        place = next(n for n, row in enumerate(telemetry.rows) if row.id == answers[name].id)
        row = telemetry.rows[place]
        first = dict.fromkeys(row.first_us, row.created_us + 1000 * first_ms)
        telemetry.rows[place] = msgspec.structs.replace(row, first_us=first)
    page = page_of(gateway, f"/requests/{answers['failed'].id}/compare")
    assert f'name="with" value="{wanted}"' in page


@pytest.mark.parametrize(
    ("other", "status", "message"),
    [("req-none", 404, "no request"), ("", 200, ""), ("same", 400, "with: ")],
)
def test_comparison_names_an_unusable_second_answer(
    gateway: ServedGateway,
    answers: dict[str, RequestTrace],
    other: str,
    status: int,
    message: str,
) -> None:
    request = answers["fine"].id
    with_id = request if other == "same" else other
    page = page_of(gateway, f"/requests/{request}/compare?with={with_id}", status)
    assert message in shown(page)


def bundle_of(gateway: ServedGateway, request: str) -> dict[str, bytes]:
    answer = gateway.http.get(f"/v1/fleet/requests/{request}/bundle")
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/zip"
    assert answer.headers["content-disposition"] == f'attachment; filename="{request}.zip"'
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


def test_bundle_has_everything_that_is_stored(
    gateway: ServedGateway, answers: dict[str, RequestTrace]
) -> None:
    gateway.client.telemetry.worker_list = [
        build(WorkerView, id=OTHER, role=TALKER, state="died", package="0.1.0", checkpoint="ab12")
    ]
    files = bundle_of(gateway, answers["interrupted"].id)
    assert files["README.txt"].startswith(b"Interrupted by a death: talker@a:2:0b died")
    assert json.loads(files["trace.json"])["id"] == answers["interrupted"].id
    assert json.loads(files["perfetto.json"])["traceEvents"]
    assert files["answer.txt"] == b"Hot is not cold."
    assert files["answer.wav"].startswith(b"RIFF") and len(files["log.jsonl"].splitlines()) == 1
    workers = {worker["id"]: worker for worker in json.loads(files["workers.json"])}
    assert workers[OTHER]["package"] == "0.1.0" and workers[OTHER]["listed"]
    assert not workers["thinker@a:1:0a"]["listed"], "a worker that is gone is named"


def test_bundle_without_sound_says_so(
    gateway: ServedGateway, answers: dict[str, RequestTrace]
) -> None:
    del gateway.client.telemetry.edge_logs[answers["fine"].id, "audio"]
    files = bundle_of(gateway, answers["fine"].id)
    assert "answer.wav" not in files and b"no longer stored" in files["README.txt"]


def test_bundle_names_nobody(gateway: ServedGateway, answers: dict[str, RequestTrace]) -> None:
    telemetry, request = gateway.client.telemetry, answers["fine"].id
    body = {
        "user": "Alice",
        "messages": [{"role": "user", "name": "Alice", "content": "What is hot?"}],
        "tools": [{"function": {"name": "look_up"}, "headers": {"Authorization": "Bearer s3cret"}}],
    }
    telemetry.traces[request] = msgspec.structs.replace(
        answers["fine"], key=SECRET_KEY, body=json.dumps(body)
    )
    place = next(n for n, line in enumerate(telemetry.lines) if line.request == request)
    line = telemetry.lines[place]
    telemetry.lines[place] = msgspec.structs.replace(
        line, message=f"{line.message}, key {SECRET_KEY}, conversation {SECRET_SESSION}"
    )
    files = bundle_of(gateway, request)
    for name, content in files.items():
        for secret in (SECRET_KEY, SECRET_SESSION, "Alice", "s3cret", "192.0.2.7"):
            assert secret.encode() not in content, f"{secret} in {name}"
    assert b"What is hot?" in files["trace.json"] and b"look_up" in files["trace.json"]
    assert b"ended, from (left out)" in files["log.jsonl"]


def test_body_that_is_no_json_is_left_out() -> None:
    assert public_body("user: Alice") == "" == public_body("")


def test_bundle_of_an_unknown_request_is_refused(gateway: ServedGateway) -> None:
    answer = gateway.http.get("/v1/fleet/requests/req-none/bundle")
    assert answer.status_code == 404
    assert answer.json()["error"]["param"] == "request_id"
