"""`fleet bench` as a command: arguments, one-line errors, the load on a gateway, and reports."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from fleet.config import load_config
from fleet.core.ids import RequestId
from fleet.core.request import RequestSpec, Sampling
from fleet.lab.client.client import ApiClient
from fleet.lab.client.errors import ApiError, ApiRefused
from fleet.lab.measure.comparison import ServingComparison
from fleet.lab.measure.deployment import own_overrides
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.hop import measure_hops
from fleet.lab.measure.load import run_phase
from fleet.lab.measure.main import run
from fleet.lab.measure.options import parse
from fleet.lab.measure.reference import ReferenceResult, run_reference
from fleet.lab.measure.serving import Serving
from fleet.lab.measure.twin_run import run as run_twin
from tests.bench_reports import PNG, report_of, shown
from tests.support import HttpHandler, free_port, serve_http, wait_until
from tests.unit.test_bench_statistics import STREAM, reference_work, result, serving

WORKERS = (
    b'{"data":[{"role":"thinker"},{"role":"talker"},{"role":"code2wav"},{"role":""}],'
    b'"missing_roles":[]}'
)


@dataclass(slots=True, kw_only=True)
class CannedGateway:
    """A gateway that streams one canned answer per request once `gate` is open, and counts open
    requests. `again`: answer to a resumption.
    """

    url: str = ""
    status: int = 200
    stream: bytes = STREAM
    again: bytes | None = None
    again_status: int = 200
    workers: bytes = WORKERS
    gate: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    num_open: int = 0
    most: int = 0
    bodies: list[bytes] = field(default_factory=list[bytes])

    def enter(self, body: bytes) -> None:
        with self.lock:
            self.bodies.append(body)
            self.num_open += 1
            self.most = max(self.most, self.num_open)

    def leave(self) -> None:
        with self.lock:
            self.num_open -= 1

    def answer(self, handler: HttpHandler) -> None:
        if handler.path.endswith("/stream"):
            handler.send(self.again_status, self.stream if self.again is None else self.again)
        elif handler.command == "GET":
            handler.send(
                200,
                self.workers if handler.path == "/v1/fleet/workers" else b'{"data":[{"id":"m"}]}',
            )
        else:
            self.enter(handler.read_body())
            self.gate.wait(10)
            handler.send(self.status, self.stream)
            self.leave()


@contextmanager
def fake_gateway() -> Iterator[CannedGateway]:
    gateway = CannedGateway()
    with serve_http(gateway.answer) as gateway.url:
        yield gateway


@pytest.fixture
def gateway() -> Iterator[CannedGateway]:
    with fake_gateway() as opened:
        yield opened


@pytest.mark.parametrize(
    "arguments",
    [
        ["--url", "http://x", "--up"],
        ["--frames", "1"],
        ["--max-tokens", "one"],
        ["--requests", "0"],
        ["--baseline", "x"],
        ["--engine", "fake"],
        ["--engine", "fake", "--sessions", "2", "--url", "http://x"],
        ["--sessions", "0"],
        ["--voice", "--telephone"],
        ["--voice", "--webrtc"],
        ["--sessions", "1", "--webrtc"],
        ["--sessions", "2", "--webrtc", "--telephone"],
    ],
)
def test_bench_usage_error_exits_with_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert "usage: fleet bench" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", ["", "--hop --up", "--voice --up --twin"])
def test_serving_is_measured_alone_or_beside_others_if_asked(arguments: str) -> None:
    assert "serving" in [each.key for each in parse(arguments.split()).chosen]


def test_sessions_option_implies_voice_benchmark() -> None:
    many = parse(["--sessions", "50", "--engine", "fake"])
    assert [each.key for each in many.chosen] == ["voice_sessions"]
    assert [each.key for each in parse(["--sessions", "1"]).chosen] == ["voice"]


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["--url", "ftp://x"], "not an address"),
        (["--url", "http://127.0.0.1:99999"], "0-65535"),
        (["--set", "nothing=1"], "unknown key"),
        (["--config", "no-such.yaml"], "no such configuration file"),
        (["--json", "no/such/folder/x.json"], "there is no folder"),
        (["--baseline", "transformers", "--set", "graph=text"], "no reference implementation"),
    ],
)
def test_bench_invalid_option_is_one_line(
    arguments: list[str], output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fleet bench: ")
    assert output in line


def test_bench_unreachable_fleet_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--url", f"http://127.0.0.1:{free_port()}"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "start a fleet with `fleet up`" in line


def test_bench_fleet_of_another_graph_is_refused(
    gateway: CannedGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.workers = b'{"data":[{"role":"lm"}],"missing_roles":[]}'
    assert run(["--url", gateway.url]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "serves the roles lm" in line
    assert "--set graph=NAME" in line


def test_bench_run_writes_table_json_and_picture(
    gateway: CannedGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.gate.set()
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    arguments = "--requests 3 --concurrency 2 --warm-up 1 --frames 7".split()
    arguments += ["--url", gateway.url, "--json", str(out), "--png", str(picture)]
    assert run(arguments) == 0
    assert "first audio" in capsys.readouterr().out
    assert picture.read_bytes().startswith(PNG)
    assert b'"throughput_audio_s_per_s"' in out.read_bytes()
    body = msgspec.json.decode(gateway.bodies[0])
    assert body["stream"] is True
    assert body["modalities"] == ["text", "audio"]
    assert {bounds["temperature"] for bounds in body["fleet"].values()} == {0.0}
    assert len(gateway.bodies) == 1 + 2 + 3 + 3


def test_phase_sends_at_most_concurrency_requests(gateway: CannedGateway) -> None:
    api, done = ApiClient(gateway.url), threading.Event()

    def measure() -> None:
        measured = run_phase("many", api, [b"{}"] * 6, 3, lambda: None)
        assert len(measured.timings) == 6
        done.set()

    thread = threading.Thread(target=measure)
    thread.start()
    wait_until(lambda: gateway.num_open == 3, "three requests under way")
    gateway.gate.set()
    thread.join()
    assert done.is_set()
    assert gateway.most == 3


@pytest.mark.parametrize("status", [429, 503])
def test_refused_request_ends_the_phase(gateway: CannedGateway, status: int) -> None:
    gateway.gate.set()
    gateway.status, gateway.stream = status, b'{"error":{"message":"the queue is full"}}'
    with pytest.raises(ApiRefused, match=f"status {status}: the queue is full"):
        run_phase("many", ApiClient(gateway.url), [b"{}"] * 4, 2, lambda: None)


def test_server_that_is_no_fleet_is_refused(gateway: CannedGateway) -> None:
    gateway.workers = b"<html>"
    with pytest.raises(ApiError, match="does not answer as a fleet does"):
        ApiClient(gateway.url).roles()


def test_failed_reference_process_reports_its_error() -> None:
    with pytest.raises(BenchError, match=r"(?s)status 1: .*No module named"):
        run_reference("fleet.lab.measure.none:run", reference_work(), advance=lambda: None)


def test_twin_answers_each_request_alone() -> None:
    """The slow twin answers each request alone, here on the fake engine, without weights."""
    config = load_config(None, ("engine=fake", "device=cpu"))
    graph = config.graph_declaration()
    specs = [
        RequestSpec(
            id=RequestId(f"r{index}"),
            graph=graph.name,
            prompt_ids=(1, 2, 3),
            outputs=tuple(graph.media),
            sampling={stage.name: Sampling(max_tokens=6) for stage in graph.stages},
        )
        for index in range(2)
    ]
    answers = run_twin(config, reference_work(*specs, warm_up=1)).answers
    assert [len(answer.answer_ids) for answer in answers] == [6, 6]
    for answer in answers:
        assert answer.num_samples > 0
        assert answer.first_audio_s is not None
        assert 0 < answer.first_audio_s <= answer.seconds


def test_hops_are_measured_between_two_processes() -> None:
    seen: list[int] = []
    hops = measure_hops(25, seen.append)
    assert len(hops.delivery_us) == len(hops.append_us) == 25
    assert min(hops.delivery_us) > 0
    assert sum(seen) == 25


def full_result() -> ServingComparison:
    return ServingComparison(serving=serving(), baseline=result(2.0), twin=result(0.7))


def test_report_shows_every_measured_part_and_names_missed_targets() -> None:
    report = report_of(serving=full_result())
    output = shown(report)
    for expected in ("first audio", "baseline", "one process", "throughput at 8 / baseline"):
        assert expected in output
    assert [ratio.name for ratio in report.missed] == ["wall time / twin"]


def test_report_json_has_every_part_and_percentiles(tmp_path: Path) -> None:
    path, whole = tmp_path / "out.json", full_result()
    report_of(serving=whole).write(path, ["serving", "hops"])
    file = msgspec.json.decode(path.read_bytes())
    assert msgspec.convert(file["report"]["serving"], Serving) == whole.serving
    assert msgspec.convert(file["report"]["twin"], ReferenceResult) == whole.twin
    assert file["report"]["agreement"] is None and file["report"]["hops"] is None
    assert set(file["percentiles"]) == {"single stream", "concurrent"}


def test_report_without_panels_writes_no_picture(tmp_path: Path) -> None:
    report_of().draw(tmp_path / "out.png")
    assert not (tmp_path / "out.png").exists()


@pytest.mark.parametrize("tls", ["tls: self-signed", "tls_cert: cert.pem\n  tls_key: key.pem"])
def test_own_fleet_listens_on_loopback_without_tls(tls: str, tmp_path: Path) -> None:
    file = tmp_path / "served.yaml"
    file.write_text(f"graph: text\nweb:\n  host: 0.0.0.0\n  port: 443\n  {tls}\n")
    web = load_config(file, ("web.read_only=false", *own_overrides(tmp_path))).web
    assert (web.scheme, web.host, web.port) == ("http", "127.0.0.1", 0)
    assert load_config(file).web.scheme == "https"
