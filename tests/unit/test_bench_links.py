"""Network namespaces with slow links, and the benchmark of a divided model over these links."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.main import run
from fleet.lab.studies.link_relay import LinkFlow
from fleet.lab.studies.links import NAMES, LinkedSteps, LinksResult
from fleet.lab.studies.namespaces import (
    PREFIX,
    RELAY,
    LinkedNamespaces,
    linked_namespaces,
    remove_abandoned,
)
from tests.bench_reports import run_bench
from tests.support import command_line, wait_until

SEND = (
    "import socket, sys; socket.socket(type=socket.SOCK_DGRAM).sendto(bytes(100), (sys.argv[1], 9))"
)
ECHO = """
import socket, sys
with socket.create_server((sys.argv[1], 9)) as server:
    connection, _ = server.accept()
    connection.sendall(connection.recv(1, socket.MSG_WAITALL))
"""
ASK = """
import socket, sys, time
until_s = time.monotonic() + 20
while True:
    try:
        connection = socket.create_connection((sys.argv[1], 9), timeout=20)
        break
    except ConnectionRefusedError:
        assert time.monotonic() < until_s
began_s = time.monotonic()
connection.sendall(b"?")
connection.recv(1)
print(time.monotonic() - began_s)
"""
UDP_HEADER_BYTES = 8


def namespace_names() -> list[str]:
    listed = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout
    return [line.split()[0] for line in listed.splitlines()]


def send_datagram(
    links: LinkedNamespaces, source: str, destination: str, num_before: int
) -> LinkFlow:
    """Send 100 bytes; return the counters of their flow once it has more than `num_before`
    datagrams, delivered or lost.
    """
    address = links.address(destination)
    subprocess.run([*links.command(source), sys.executable, "-c", SEND, address], check=True)

    def grown() -> LinkFlow | None:
        flows = [flow for flow in links.flows(source, destination) if not flow.destination_port]
        return next(
            (flow for flow in flows if flow.num_bytes + flow.num_lost_bytes > num_before), None
        )

    flow = wait_until(grown, "the datagram to be counted")
    assert flow is not None
    return flow


@pytest.mark.network_namespaces
def test_links_delay_count_and_lose_packets() -> None:
    delay_s, num_bytes = 0.05, 100 + UDP_HEADER_BYTES
    with linked_namespaces("a", "b", "c", delay_s=delay_s) as links:
        command = [*links.command("b"), sys.executable, "-c", ECHO, links.address("b")]
        with subprocess.Popen(command) as server:
            asked = [*links.command("a"), sys.executable, "-c", ASK, links.address("b")]
            took_s = float(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
            assert took_s >= 2 * delay_s and server.wait(10) == 0
        assert (
            sum(flow.num_bytes for flow in links.flows("a", "b") if flow.destination_port == 9) == 1
        )
        first = send_datagram(links, "a", "b", 0)
        assert (first.num_bytes, first.num_lost_bytes) == (num_bytes, 0)
        links.cut("b", "a")
        second = send_datagram(links, "a", "b", num_bytes)
        assert (second.num_bytes, second.num_lost_bytes) == (num_bytes, num_bytes)
        assert send_datagram(links, "a", "c", 0).num_bytes == num_bytes, (
            "the other links are not cut"
        )
        links.heal("a", "b")
        assert send_datagram(links, "a", "b", 2 * num_bytes).num_bytes == 2 * num_bytes


@pytest.mark.network_namespaces
def test_namespaces_are_removed_after_an_error_and_those_of_a_killed_process_later() -> None:
    with pytest.raises(KeyError), linked_namespaces("a", "b") as links:
        assert {links.command(name)[-1] for name in "ab"} <= set(namespace_names())
        raise KeyError
    # more than the largest process id
    subprocess.run(["ip", "netns", "add", f"{PREFIX}4194305-a"], check=True)
    remove_abandoned()
    left = namespace_names()
    assert links.command("a")[-1] not in left and f"{PREFIX}4194305-a" not in left


@pytest.mark.network_namespaces
def test_ended_relay_is_an_error_and_leaves_no_namespace() -> None:
    with (
        pytest.raises(BenchError, match="the relay of the links ended"),
        linked_namespaces("a", "b") as links,
    ):
        (relay,) = (child for child in psutil.Process().children() if RELAY in command_line(child))
        relay.kill()
        links.cut("a", "b")
    assert links.command("a")[-1] not in namespace_names()


@pytest.mark.network_namespaces
@pytest.mark.one_in(11, "benchmarks")
def test_small_measurement_over_links_reports_both_divisions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_bench(tmp_path, LinksResult, "links", "--links", "--small")
    assert "plain TCP" in capsys.readouterr().out
    assert result.num_equal == result.num_answers == 2
    for each in result.steps:
        assert (
            len(each.step_s) == len(each.hop_s) == len(each.undelayed_s) == 8
            and len(each.tcp_s) == 9
        )
        delay_s = len(NAMES) * result.delay_ms / 1e3
        assert min(each.hop_s) >= delay_s and min(each.tcp_s) >= delay_s
    logits, row = (each.sizes for each in result.steps)
    assert logits[-1] > 4 * 1000 and logits[:2] == pytest.approx(row[:2], rel=0.1)


def steps(step_s: float) -> LinksResult:
    measured = LinkedSteps(
        name="row returns",
        step_s=(step_s,) * 3,
        hop_s=(step_s - 0.01,) * 3,
        undelayed_s=(0.011,),
        tcp_s=(0.03,),
        sizes=(1, 2, 3),
    )
    return LinksResult(
        model="m", delay_ms=10.0, steps=(measured,), num_equal=1, num_answers=1, others_cores=0.0
    )


def test_target_of_links_is_the_time_beyond_the_computation() -> None:
    assert [ratio.met for ratio in steps(0.045).targets()] == [True, True]
    assert [ratio.met for ratio in steps(0.047).targets()] == [False, True]


def test_links_without_namespaces_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert run(["--links"]) == 1
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert (
        line
        == "fleet bench: --links needs network namespaces: network namespaces need Linux, and root"
    )
