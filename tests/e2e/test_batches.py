"""Batches on a fleet of real processes: processes are killed in the middle, and each line is
answered once.
"""

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from openai import OpenAI
from openai.types import Batch

from fleet.batches.records import output_file_of
from fleet.batches.store import BatchStore
from fleet.graphs import DEFAULT_GRAPH, GRAPHS
from tests.e2e.fleets import FAKE, ProcessFleet, fleet_up, process_of, worker_ids
from tests.support import command_line, run_cli, start_cli, wait_until

pytestmark = pytest.mark.one_file_in(10, "processes")

MAIN = GRAPHS[DEFAULT_GRAPH].main_stage.name
STEP_MS, NUM_TOKENS = 40, 20
NUM_LINES, NUM_THOROUGH_LINES = 100, 1000
PATIENCE_S = 600.0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessFleet]:
    """A fleet with two workers of the main stage, whose answers take almost a second."""
    slow = (f"stages.{MAIN}.extra.step_ms={STEP_MS}", f"stages.{MAIN}.replicas=2")
    with fleet_up(tmp_path_factory.mktemp("batches"), *FAKE, *slow) as running:
        yield running


@pytest.fixture
def client(fleet: ProcessFleet) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{fleet.url}/v1", api_key="none") as client:
        yield client


def write_lines(path: Path, model: str, num: int = NUM_LINES) -> set[str]:
    """Write an input file; return the ids of its lines."""
    lines = [
        {
            "custom_id": f"line {number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": model,
                "messages": [{"role": "user", "content": f"number {number}"}],
                "max_tokens": NUM_TOKENS,
                "ignore_eos": True,
            },
        }
        for number in range(num)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {str(line["custom_id"]) for line in lines}


def start_batch(client: OpenAI, path: Path) -> Batch:
    file = client.files.create(file=path, purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )


def job_worker(fleet: ProcessFleet) -> psutil.Process:
    """Return the job worker; the process of a job has the same command line."""
    process = fleet.commands()["jobs"]
    parent = process.parent()
    is_job = parent is not None and command_line(parent) == command_line(process)
    return parent if parent is not None and is_job else process


def num_answered(client: OpenAI, batch: Batch) -> int:
    counts = client.batches.retrieve(batch.id).request_counts
    return counts.completed if counts is not None else 0


def ended(client: OpenAI, batch: Batch) -> Batch:
    def found() -> Batch | None:
        now = client.batches.retrieve(batch.id)
        return now if now.status in ("completed", "cancelled", "failed", "expired") else None

    result = wait_until(found, "the batch to end", PATIENCE_S)
    assert result is not None
    return result


def ids_in(lines: Sequence[str], is_answer: Callable[[dict[str, Any]], bool]) -> set[str]:
    """Return the ids in an output or error file, each of which is there once."""
    entries = [json.loads(line) for line in lines]
    found = {str(entry["custom_id"]) for entry in entries}
    assert len(found) == len(entries) and all(map(is_answer, entries)), entries
    return found


def is_success(entry: dict[str, Any]) -> bool:
    response = entry["response"]
    return response is not None and response["status_code"] == 200 and entry["error"] is None


def kill_job(fleet: ProcessFleet, output: Path) -> bytes:
    """Kill the job worker; return the whole lines that its job had written until its end."""
    worker = job_worker(fleet)
    killed = [worker, *worker.children(recursive=True)]
    worker.kill()
    wait_until(lambda: not any(map(command_line, killed)), "its job to end with it")
    written = output.read_bytes()
    return written[: written.rfind(b"\n") + 1]


@pytest.mark.timeout(1800)  # for the thousand lines of a thorough run
def test_killed_job_worker_and_worker_cost_no_line_and_answer_none_twice(
    fleet: ProcessFleet, control: redis.Redis, client: OpenAI, tmp_path: Path, thorough: bool
) -> None:
    num_lines, num_kills = (NUM_THOROUGH_LINES, 2) if thorough else (NUM_LINES, 1)
    ids = write_lines(tmp_path / "in.jsonl", client.models.list().data[0].id, num_lines)
    batch = start_batch(client, tmp_path / "in.jsonl")
    output = BatchStore(fleet.config).files.prepare(output_file_of(batch.id))
    written = b""
    for number in range(num_kills):
        reached = max(4, number * num_lines // num_kills)
        wait_until(
            lambda least=reached: num_answered(client, batch) >= least, "answers", PATIENCE_S
        )
        assert output.read_bytes().startswith(written)
        written = kill_job(fleet, output)
        num_before = written.count(b"\n")
        wait_until(
            lambda least=num_before: num_answered(client, batch) > least,
            "the next job to continue",
            PATIENCE_S,
        )
        process_of(next(name for name in worker_ids(control) if name.startswith(f"{MAIN}@"))).kill()
    done = ended(client, batch)
    assert done.status == "completed" and done.error_file_id is None
    assert done.request_counts is not None and done.output_file_id is not None
    assert done.request_counts.to_dict() == {
        "total": num_lines,
        "completed": num_lines,
        "failed": 0,
    }
    content = client.files.content(done.output_file_id).read()
    assert content.startswith(written), "lines that had an answer were not sent again"
    assert ids_in(content.decode().splitlines(), is_success) == ids


def test_cancelled_batch_keeps_its_answers(
    fleet: ProcessFleet, client: OpenAI, tmp_path: Path
) -> None:
    ids = write_lines(tmp_path / "in.jsonl", client.models.list().data[0].id, 1000)
    batch = start_batch(client, tmp_path / "in.jsonl")
    wait_until(lambda: num_answered(client, batch) >= 2, "the first answers", PATIENCE_S)
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = ended(client, batch)
    assert done.status == "cancelled" and done.output_file_id and done.error_file_id
    answers = ids_in(client.files.content(done.output_file_id).text.splitlines(), is_success)
    errors = ids_in(
        client.files.content(done.error_file_id).text.splitlines(),
        lambda entry: "batch_cancelled" in str(entry["error"]),
    )
    assert answers | errors == ids and not answers & errors and len(answers) >= 2


def test_command_continues_after_a_kill(
    fleet: ProcessFleet, client: OpenAI, tmp_path: Path
) -> None:
    ids = write_lines(tmp_path / "in.jsonl", client.models.list().data[0].id, 20)
    out = tmp_path / "out.jsonl"
    command = ("batch", "in.jsonl", "out.jsonl", "--url", fleet.url)

    def lines() -> list[str]:
        return out.read_text().splitlines() if out.exists() else []

    with start_cli(*command, cwd=tmp_path, env=fleet.env) as first:
        wait_until(lambda: len(lines()) >= 3, "the first answers", PATIENCE_S)
        first.stop(signal.SIGKILL)
    kept = out.read_text().rpartition("\n")[0]
    continued = run_cli(*command, cwd=tmp_path, env=fleet.env)
    assert continued.returncode == 0, continued.stderr
    assert "20 of 20 lines answered" in continued.stderr
    assert out.read_text().startswith(kept) and ids_in(lines(), is_success) == ids
    assert not (tmp_path / "out.errors.jsonl").exists()
    complete = out.read_text()
    assert run_cli(*command, cwd=tmp_path, env=fleet.env).returncode == 0
    assert out.read_text() == complete


def test_command_refuses_a_faulty_file_and_reports_failed_lines(
    fleet: ProcessFleet, tmp_path: Path
) -> None:
    command = ("batch", "in.jsonl", "out.jsonl", "--url", fleet.url)
    (tmp_path / "in.jsonl").write_text("no JSON\n")
    refused = run_cli(*command, cwd=tmp_path, env=fleet.env)
    assert refused.returncode == 1 and "line 1: not a request" in refused.stderr
    write_lines(tmp_path / "in.jsonl", "no-such-model", 2)
    failed = run_cli(*command, cwd=tmp_path, env=fleet.env)
    assert failed.returncode == 1 and "2 with errors" in failed.stderr
    errors = (tmp_path / "out.errors.jsonl").read_text().splitlines()
    assert len(errors) == 2 and all("model_not_found" in line for line in errors)
