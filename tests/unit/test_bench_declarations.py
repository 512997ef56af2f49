"""Declarations of all measurements of `fleet bench`, and how a new measurement in a file of its own
is declared.
"""

import re
from pathlib import Path

import msgspec
import pytest

from fleet.core.jobs import MEASURE_TAKES
from fleet.lab import studies
from fleet.lab.measure.main import run
from fleet.lab.measure.measurement import Measurement
from fleet.lab.measure.options import measurements, parse
from tests.bench_reports import PNG
from tests.support import REPO

OPTIONS = [each for each in measurements() if each.option]
NEW = """
from fleet.lab.measure.measurement import Context, Measurement, argument, whole_number
from fleet.lab.report.result import Result
from fleet.lab.report.stats import Ratio, at_most
from fleet.lab.report.tables import table_of, titled


class Squares(Result, frozen=True, kw_only=True):
    numbers: tuple[int, ...]

    def tables(self):
        return [titled(f"{len(self.numbers)} squares", table_of("square"))]

    def panels(self):
        return [lambda axes: axes.plot(self.numbers)]

    def targets(self):
        return [at_most("largest square", max(self.numbers), 10)]


MEASUREMENT = Measurement(
    place=500,
    key="squares",
    run=lambda context: Squares(
        numbers=tuple(n * n for n in range(context.options.count_of_squares))
    ),
    option="--squares",
    help="measure squares",
    about={"--squares": "squares of small numbers"},
    arguments=(argument("--count-of-squares", type=whole_number(), default=3),),
)
"""


def test_declarations_share_no_name_and_no_place() -> None:
    for names in (
        [each.place for each in measurements()],
        [each.key for each in measurements()],
        [each.option for each in OPTIONS],
    ):
        assert len(set(names)) == len(names)


def test_help_lists_every_measurement_with_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    words = " ".join(shown.split())
    for each in measurements():
        assert f"{each.option} " in shown and each.help in words
        for label, text in each.about.items():
            assert label in shown and text in words
    commands = [line for line in shown.splitlines() if not line.startswith("  fleet bench")]
    assert max(map(len, commands)) <= 100
    assert "fleet bench --up --baseline transformers" in words and "Exit status" in words


@pytest.mark.parametrize("each", OPTIONS, ids=lambda each: each.option)
def test_option_alone_requests_its_measurement_and_no_serving(each: Measurement) -> None:
    assert parse([each.option]).chosen == (each,)


@pytest.mark.parametrize("each", OPTIONS, ids=lambda each: each.option)
def test_small_is_accepted_beside_measurements_that_have_a_small_size(
    each: Measurement, capsys: pytest.CaptureFixture[str]
) -> None:
    if each.has_small:
        assert parse([each.option, "--small"]).small
    else:
        assert run([each.option, "--small"]) == 2
        assert "--small is the small size of" in capsys.readouterr().err


def test_page_has_a_row_for_every_measurement() -> None:
    page = (REPO / "fleet" / "docs" / "measuring.md").read_text()
    rows = "\n".join(line for line in page.splitlines() if line.startswith("| `fleet bench"))
    options = set(re.findall(r"--[\w-]+", rows))
    labels = {label for each in measurements() for label in each.about} - {"serving"}
    assert labels <= options


def test_every_kind_of_benchmark_job_is_a_measurement_with_its_arguments() -> None:
    by_name = {(each.option or f"--{each.key}"): each for each in measurements()}
    assert {f"--{name}" for name in MEASURE_TAKES} <= by_name.keys()


def test_new_measurement_in_one_file_has_help_report_and_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "squares_study.py").write_text(NEW)
    monkeypatch.setattr(studies, "__path__", [*studies.__path__, str(tmp_path)])
    measurements.cache_clear()
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["--squares", "--count-of-squares", "5", "--json", str(out), "--png", str(picture)]
    try:
        assert run(["--help"]) == 0
        assert "squares of small numbers" in capsys.readouterr().out
        assert run([*arguments, "--check"]) == 1
    finally:
        measurements.cache_clear()
    assert "5 squares" in capsys.readouterr().out and picture.read_bytes().startswith(PNG)
    file = msgspec.json.decode(out.read_bytes())
    assert file["report"]["squares"] == {"numbers": [0, 1, 4, 9, 16]}
    assert file["met"] == {"largest square": False} and file["report"]["hops"] is None
