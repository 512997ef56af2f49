"""Metrics: continuity of playback, reports of players, transfers between workers, and the alerts of
Prometheus over them.
"""

import re
from typing import Any

import pytest
import yaml

from fleet.core.ids import RequestId, RoleName, StageName
from fleet.telemetry.views import RoleView
from tests.support import REPO, await_until
from tests.web.conftest import Loaded, ServedGateway, chat
from tests.web.divided import ANCHOR, FIRST, STANDS_BY, divided_workers
from tests.web.plausible import busy
from tests.web.plausible_requests import worker_id
from web.gateway import playback_reports
from web.gateway.metrics import FINISHED, PlaybackContinuity
from web.gateway.playback_reports import PlaybackReports


@pytest.mark.parametrize(
    ("arrivals", "ok"),
    [
        ([], True),
        ([(0.1, 5.0)], True),
        ([(0.1, 5.0), (0.2, 5.1), (1.0, 5.25)], True),
        ([(0.1, 5.0), (0.2, 5.19)], True),
        ([(0.1, 5.0), (0.2, 5.21)], False),
        ([(0.1, 5.0), (0.2, 5.21), (9.0, 5.22)], False),
        ([(2.0, 5.0), (2.1, 7.05), (2.2, 7.15)], True),
    ],
)
def test_playback_without_gap_of_a_tenth_of_a_second_is_continuous(
    arrivals: list[tuple[float, float]], ok: bool
) -> None:
    continuity = PlaybackContinuity()
    for audio_s, now_s in arrivals:
        continuity.add(audio_s, now_s)
    assert continuity.ok is ok


async def test_playback_reports_of_an_interval_are_written_once(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(playback_reports, "WRITE_INTERVAL_S", 0.01)
    client = loaded.fake_client()
    reports, one, other = PlaybackReports(client), RequestId("req-1"), RequestId("req-2")
    for samples in (10, 20, 30):
        reports.note(one, samples, 1)
    reports.note(other, 5, 0)

    async def settled() -> bool:
        return (one, 30, 3) in client.telemetry.heard and (other, 5, 0) in client.telemetry.heard

    await await_until(settled, "both to be written")
    assert len([written for written in client.telemetry.heard if written[0] == one]) == 1, (
        "one write for three reports"
    )


def test_metrics_list_transfers_by_edge_and_running_tasks_by_replica(
    gateway: ServedGateway,
) -> None:
    gateway.client.show(busy(gateway.client.graph))
    talker = next(
        view
        for view in gateway.client.telemetry.worker_list
        if view.role == "talker" and not view.gone
    )
    lines = gateway.http.get("/metrics").text.splitlines()
    for line in (
        'fleet_transfer_pulls_total{edge="thought"} 930.0',
        'fleet_transfer_failures_total{edge="thought"} 2.0',
        'fleet_transfer_seconds_bucket{edge="thought",le="0.0002"} 0.0',
        'fleet_transfer_seconds_bucket{edge="thought",le="0.001585"} 900.0',
        'fleet_transfer_seconds_bucket{edge="thought",le="+Inf"} 930.0',
        'fleet_transfer_seconds_count{edge="thought"} 930.0',
        f'fleet_num_requests_running{{model_name="omni",replica="{talker.id}",stage="talker"}} '
        f"{float(talker.running)}",
    ):
        assert line in lines, line


def test_metrics_list_drafts_by_worker_and_position(gateway: ServedGateway) -> None:
    reported = busy(gateway.client.graph)
    gateway.client.show(reported)
    lines = gateway.http.get("/metrics").text.splitlines()
    drafting = next(view for view in reported.worker_list if view.speculation is not None)
    own = f'role="thinker",worker="{drafting.id}"'
    for line in (
        f'fleet_draft_passes_total{{drafter="suffix",{own}}} 1000.0',
        f'fleet_draft_tokens_total{{drafter="suffix",position="1",{own}}} 900.0',
        f'fleet_draft_accepted_tokens_total{{drafter="suffix",position="3",{own}}} 210.0',
    ):
        assert line in lines, line


def test_metrics_list_passes_of_divided_models_by_role_and_worker(gateway: ServedGateway) -> None:
    standby = worker_id("thinker.span", STANDS_BY)
    reported = busy(gateway.client.graph)
    reported.worker_list += divided_workers(StageName("thinker"))
    gateway.client.show(reported)
    lines = gateway.http.get("/metrics").text.splitlines()
    first = f'role="thinker.span",worker="{worker_id("thinker.span", FIRST)}"'
    anchor = f'role="thinker",worker="{worker_id("thinker", ANCHOR)}"'
    for line in (
        f"fleet_span_passes_total{{{first}}} 12000.0",
        f"fleet_span_rows_total{{{first}}} 61500.0",
        f'fleet_span_seconds_total{{phase="compute",{first}}} 22.8',
        f'fleet_span_seconds_total{{phase="wait",{first}}} 3.6',
        f'fleet_span_seconds_total{{phase="send",{first}}} 1.2',
        f"fleet_span_pass_seconds_total{{{anchor}}} 108.0",
        f'fleet_span_bytes_total{{direction="received",{first}}} 3.1e+08',
        f'fleet_span_bytes_total{{direction="sent",{first}}} 6.2e+08',
        f"fleet_span_weight_bytes{{{first}}} 1.5e+09",
        f'fleet_span_passes_total{{role="thinker.span",worker="{standby}"}} 0.0',
        'fleet_span_unused{role="thinker.span"} 2.0',
    ):
        assert line in lines, line
    assert not any(
        line.startswith("fleet_span_pass_seconds_total") and first in line for line in lines
    )
    gateway.client.show(busy(gateway.client.graph))
    assert "fleet_span_passes_total{" not in gateway.http.get("/metrics").text


RULES = REPO / "deploy" / "prometheus" / "alerts.yaml"
SELECTOR = re.compile(r"(fleet_\w+)(?:\{([^}]*)\})?")


def alert_rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_alert_rules_name_metrics_labels_and_outcomes_that_are_served(
    gateway: ServedGateway,
) -> None:
    gateway.client.show(busy(gateway.client.graph))
    gateway.client.telemetry.role_list = [RoleView(role=RoleName("talker"))]
    assert chat(gateway).status_code == 200
    served = gateway.http.get("/metrics").text
    for rule in alert_rules():
        selected = SELECTOR.findall(rule["expr"])
        assert selected, rule["alert"]
        grouped = re.findall(r"by \((\w+)\)", rule["expr"])
        for name, matchers in selected:
            samples = re.findall(rf"^{name}(?:\{{(.*)\}})? ", served, re.MULTILINE)
            labels = {label for sample in samples for label in re.findall(r"(\w+)=", sample)}
            assert f"# TYPE {name} " in served, f"{rule['alert']}: {name}"
            wanted = {*grouped, *re.findall(r"(\w+)[=!~]+\"", matchers)}
            assert wanted <= labels, f"{rule['alert']}: {name} has {labels}"
    (failed,) = [rule for rule in alert_rules() if rule["alert"] == "FleetAnswersFail"]
    assert all(outcome in failed["expr"] for outcome in (*FINISHED, "aborted", "left"))


def test_alert_rules_are_complete() -> None:
    rules = alert_rules()
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert rule["labels"]["severity"] in ("page", "warn")
        assert re.fullmatch(r"\d+m", rule["for"])
