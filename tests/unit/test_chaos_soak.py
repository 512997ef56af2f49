"""Verdict of a soak run: what counts as growth, and runs in which no process is killed."""

import io
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from fleet.lab.faults.errors import ChaosError
from fleet.lab.faults.options import ChaosOptions, check_soak
from fleet.lab.faults.soak_load import SoakCounts
from fleet.lab.faults.soak_report import (
    CALM,
    END,
    QUARTER,
    SoakVerdict,
    changes_between,
    draw,
    has_passed,
    is_calm,
    show,
)
from fleet.lab.faults.soak_samples import ProcessSample, SoakSample, process_kind
from fleet.lab.faults.watch import Residue
from fleet.lab.report.machine import describe_machine

TOTAL, MIB = 1000, 1 << 20


def sample(
    sent: int, *, redis_mib: float = 20.0, keys: int = 1000, rss_mib: float = 100.0, files: int = 20
) -> SoakSample:
    process = ProcessSample(
        kind="web", pid=1, rss_bytes=int(rss_mib * MIB), pss_bytes=MIB, files=files, threads=4
    )
    return SoakSample(
        at_s=sent / 10,
        sent=sent,
        redis_bytes=int(redis_mib * MIB),
        keys=keys + 50,
        history_keys=50,
        processes=(process,),
    )


def failed(**end: float) -> list[str]:
    """Return the names of the quantities that grew too much between a quarter of the run and its
    end.
    """
    samples = (
        sample(100, redis_mib=1, keys=1, rss_mib=1, files=1),
        sample(280),
        sample(960, **end),  # pyright: ignore[reportArgumentType]
    )
    return [change.name for change in changes_between(samples, TOTAL) if not change.passed]


@pytest.mark.parametrize(
    ("end", "names"),
    [
        ({}, []),
        ({"redis_mib": 20.5, "keys": 1029, "rss_mib": 102.9, "files": 21}, []),
        ({"redis_mib": 5.0, "rss_mib": 50.0}, []),
        ({"redis_mib": 20.7}, ["Redis: memory"]),
        ({"keys": 1031}, ["Redis: keys"]),
        ({"rss_mib": 103.2}, ["web: RSS"]),
        ({"files": 22}, ["web: open files"]),
    ],
)
def test_growth_of_more_than_three_percent_fails(end: dict[str, float], names: list[str]) -> None:
    assert failed(**end) == names


def test_no_process_is_killed_shortly_before_or_during_a_comparison() -> None:
    for (low, high), (calm_low, calm_high) in zip((QUARTER, END), CALM, strict=True):
        assert calm_low < low < high <= calm_high and is_calm(low) and is_calm(high)
    assert CALM[0][1] - CALM[0][0] == pytest.approx(CALM[1][1] - CALM[1][0]), (
        "processes are as old in both"
    )
    assert not is_calm(0.1) and not is_calm(0.5)


@pytest.mark.parametrize(
    ("counts", "residue"),
    [
        (SoakCounts(lost=1), Residue()),
        (SoakCounts(different=1), Residue()),
        (SoakCounts(), Residue(live=1)),
    ],
)
def test_lost_and_different_answers_and_leftovers_fail(
    counts: SoakCounts, residue: Residue
) -> None:
    changes = changes_between((sample(280), sample(960)), TOTAL)
    assert has_passed(SoakCounts(answered=TOTAL), changes, Residue()) and not has_passed(
        counts, changes, residue
    )
    assert not has_passed(SoakCounts(answered=TOTAL), (), Residue()), (
        "a soak without samples shows nothing"
    )


def test_verdict_is_shown_drawn_and_stored(tmp_path: Path) -> None:
    samples = (sample(280), sample(960, rss_mib=150.0))
    verdict = SoakVerdict(
        passed=False,
        began="2026-01-01T00:00:00+0000",
        command=("chaos",),
        machine=describe_machine(),
        seed=0,
        requests=TOTAL,
        complete=True,
        seconds=60.0,
        concurrency=8,
        counts=SoakCounts(answered=TOTAL),
        kills=((1.0, "web"),),
        changes=changes_between(samples, TOTAL),
        residue=Residue(),
        samples=samples,
    )
    console = Console(width=160, record=True, file=io.StringIO())
    show(verdict, console)
    shown = console.export_text()
    assert "soak failed" in shown and "+50.0%" in shown and "missed" in shown
    draw(verdict, tmp_path / "soak.png")
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")
    assert msgspec.json.decode(msgspec.json.encode(verdict), type=SoakVerdict) == verdict


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (["python", "-m", "fleet.cli", "worker", "talker", "--replica", "1"], "worker talker"),
        (["python", "-m", "fleet.cli", "web", "--set", "web.port=1"], "web"),
        (["python", "-m", "fleet.cli", "web", "--keep"], "keeper"),
        (["/usr/bin/redis-server *:0"], "redis-server"),
        ([], ""),
    ],
)
def test_process_is_named_after_its_command(command: list[str], kind: str) -> None:
    assert process_kind(command) == kind


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"soak": 99}, "--soak 99: give at least 100"),
        ({"minutes": 0.0}, "--minutes 0.0: give"),
        ({"concurrency": 0}, "--conc"),
    ],
)
def test_invalid_soak_option_is_named_with_the_fix(changed: dict[str, float], message: str) -> None:
    options = ChaosOptions(seed=0, requests=1, spacing_s=1.0, soak=100, minutes=1.0, concurrency=8)
    check_soak(options)
    with pytest.raises(ChaosError, match=message):
        check_soak(replace(options, **changed))  # pyright: ignore[reportArgumentType]
