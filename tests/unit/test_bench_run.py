"""The benchmark as a command: arguments, one-line errors, the load on a gateway, and reports."""

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from fleet.config import load_config
from fleet.core.ids import RequestId
from fleet.core.request import RequestSpec, Sampling
from fleet.lab.client.client import ApiClient
from fleet.lab.client.errors import ApiError, ApiRefused
from fleet.lab.measure.deployment import own_overrides
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.hop import measure_hops
from fleet.lab.measure.load import run_phase
from fleet.lab.measure.main import run
from fleet.lab.measure.options import parse
from fleet.lab.measure.reference import run_in_subprocess
from fleet.lab.measure.report import BenchFile, BenchReport, draw, judge, show, write_report
from fleet.lab.measure.twin_run import run as run_twin
from fleet.lab.report.machine import describe_machine
from fleet.lab.report.stats import Ratio
from tests.support import HttpHandler, free_port, serve_http, wait_until
from tests.unit.test_bench_statistics import STREAM, reference_work, result, serving

PNG = b"\x89PNG"
WORKERS = (
    b'{"data":[{"role":"thinker"},{"role":"talker"},{"role":"code2wav"},{"role":""}],'
    b'"missing_roles":[]}'
)


@dataclass(slots=True, kw_only=True)
class CannedGateway:
    """Streams one canned answer per request once `gate` is open, and counts open requests. `again`:
    the answer if resumed.
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
    ],
)
def test_bench_usage_error_exits_with_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert "usage: fleet bench" in capsys.readouterr().err


def test_bench_help_shows_example_and_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    output = capsys.readouterr().out
    assert "fleet bench --up --baseline transformers" in output
    assert "Exit status" in output


@pytest.mark.parametrize(
    "arguments", ["", "--hop --up", "--scale --up", "--interference --up", "--voice --up --twin"]
)
def test_serving_is_measured_alone_or_beside_others_if_asked(arguments: str) -> None:
    assert parse(arguments.split()).serving


@pytest.mark.parametrize(
    "arguments",
    [
        "--hop --transfer",
        "--scale",
        "--hand-off",
        "--interference --hand-off",
        "--voice",
        "--voice --up",
        "--barge-in --up",
        "--spans",
        "--span-hops",
        "--too-large --small",
        "--links",
        "--speculation --small",
        "--training --small",
    ],
)
def test_other_measurements_alone_skip_serving(arguments: str) -> None:
    assert not parse(arguments.split()).serving


def test_sessions_option_implies_voice_benchmark() -> None:
    many = parse(["--sessions", "50", "--engine", "fake"])
    assert many.voice and many.up and many.sessions == 50 and not many.serving
    assert parse(["--voice"]).sessions == 1


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
    arguments = [
        "--url",
        gateway.url,
        "--requests",
        "3",
        "--concurrency",
        "2",
        "--warm-up",
        "1",
        "--frames",
        "7",
    ]
    assert run([*arguments, "--json", str(out), "--png", str(picture)]) == 0
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
    with pytest.raises(BenchError, match=r"status 1: .*No module named"):
        run_in_subprocess("fleet.lab.measure.no_such_module", [], reference_work(), lambda: None)


def test_twin_answers_each_request_alone() -> None:
    """On the fake engine, without weights."""
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


def full_report() -> BenchReport:
    report = BenchReport(
        began="2026-01-01T00:00:00+0000",
        command=("--up",),
        machine=describe_machine(),
        serving=serving(),
        baseline=result(2.0),
        twin=result(0.9),
    )
    missed = Ratio(name="missed", value=2.0, target=1.0, at_most=True)
    return msgspec.structs.replace(report, ratios=(*judge(report).ratios, missed))


def shown(report: BenchReport) -> str:
    """Return what the terminal shows."""
    console = Console(width=160, record=True, file=io.StringIO())
    show(report, console)
    return console.export_text()


def test_report_shows_every_measured_part() -> None:
    report = full_report()
    output = shown(report)
    for expected in (
        "first audio",
        "baseline",
        "one process",
        "throughput at 8 / baseline",
        "missed",
        "load",
    ):
        assert expected in output
    assert [ratio.name for ratio in report.missed] == ["missed"]


def test_report_json_reads_back_the_same(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    report = full_report()
    write_report(report, path)

    assert msgspec.json.decode(path.read_bytes(), type=BenchFile).report == report


def test_report_without_panels_writes_no_picture(tmp_path: Path) -> None:
    path = tmp_path / "out.png"
    draw(msgspec.structs.replace(full_report(), serving=None), path)
    assert not path.exists()


@pytest.mark.parametrize("tls", ["tls: self-signed", "tls_cert: cert.pem\n  tls_key: key.pem"])
def test_own_fleet_listens_on_loopback_without_tls(tls: str, tmp_path: Path) -> None:
    file = tmp_path / "served.yaml"
    file.write_text(f"graph: text\nweb:\n  host: 0.0.0.0\n  port: 443\n  {tls}\n")
    web = load_config(file, ("web.read_only=false", *own_overrides(tmp_path))).web
    assert (web.scheme, web.host, web.port) == ("http", "127.0.0.1", 0)
    assert load_config(file).web.scheme == "https"
