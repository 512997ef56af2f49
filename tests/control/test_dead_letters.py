"""Dead letters: a request that kills workers is stored completely, and can be shown, retried and
dropped.
"""

import asyncio
import re
from pathlib import Path
from typing import cast

import pytest
import redis
from typer.testing import CliRunner, Result

from fleet.cli.main import app
from fleet.config import FleetConfig
from fleet.control import keys, scripts
from fleet.control.connect import connect_async, first_text, run, text, texts
from fleet.control.dead_letters import (
    DeadLetter,
    drop_letters,
    read_blob,
    read_letter,
    read_letters,
    spec_of,
)
from fleet.control.operations import Operations
from fleet.core.errors import BadInput, ConfigError, Conflict, UnknownWireVersion
from fleet.core.ids import EdgeName, Epoch, RequestId, RoleName, StageName, WorkerId
from fleet.core.request import AudioClip, RequestSpec, Sampling
from fleet.graphs import get_graph
from tests.control_plane import MAX_DEATHS
from tests.harness import answer, gateway, thread_fleet
from tests.support import run_cli

GRAPH = get_graph("qwen3_omni")
STAGE, GATEWAY, BLOB = GRAPH.stages[0].name, WorkerId("gateway@test:1:a"), b"\x00\x00\x80?" * 4
CAUSE = f"{MAX_DEATHS + 1} workers of stage {STAGE} died over this request"


def make_spec(request: str, audio: tuple[AudioClip, ...] = ()) -> RequestSpec:
    sampling = {stage.name: Sampling(max_tokens=12, seed=1) for stage in GRAPH.stages}
    outputs = tuple(GRAPH.media)
    return RequestSpec(
        id=RequestId(request),
        graph=GRAPH.name,
        prompt_ids=(1, 2, 3),
        outputs=outputs,
        sampling=sampling,
        audio=audio,
    )


def create_dead_letters(
    client: redis.Redis,
    *requests: str,
    blob: bytes | None = BLOB,
    audio: tuple[AudioClip, ...] = (),
) -> None:
    """Submit requests, and let each kill its workers until it is a dead letter."""
    run(client, scripts.register(GATEWAY, "", 60_000_000, {"kind": "test"}))
    for request in requests:
        spec = make_spec(request, audio)
        edges = [edge.name for edge in GRAPH.edges]
        stages = [stage.name for stage in GRAPH.stages]
        run(
            client,
            scripts.submit(spec, blob, bound=99, stages=stages, edges=edges, gateway=GATEWAY),
        )
        for number in range(MAX_DEATHS + 1):
            kill_a_worker(client, spec.id, WorkerId(f"{STAGE}@test:{number}:{request}"))


def kill_a_worker(client: redis.Redis, request: RequestId, worker: WorkerId) -> None:
    """Let a worker that joins claim the task of `STAGE`, and die over it."""
    run(client, scripts.register(worker, STAGE, 60_000_000, {"kind": "test"}))
    epoch, entry = texts(client.hmget(keys.task(request, STAGE), ["epoch", "entry"]))
    role = RoleName(STAGE)
    assert (
        first_text(
            run(client, scripts.claim(worker, role, entry, request, STAGE, Epoch(int(epoch))))
        )
        == "ok"
    )
    run(client, scripts.fence_worker("", worker, died=True))


def fleet_command(redis_url: str, *arguments: str) -> Result:
    """Run `fleet dead-letters ARGUMENTS` in this process."""
    env = {"REDIS_URL": redis_url, "COLUMNS": "120", "NO_COLOR": "1"}
    return CliRunner().invoke(app, ["dead-letters", *arguments], env=env)


@pytest.fixture(autouse=True)
def no_config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a folder without a configuration file, so that default settings apply."""
    monkeypatch.chdir(tmp_path)


def test_dead_letter_contains_spec_and_blob_of_its_request(client: redis.Redis) -> None:
    create_dead_letters(client, "req-1", "req-2")
    first, second = read_letters(client)
    seconds, _ = client.time()
    assert (first.request, second.request) == ("req-1", "req-2")
    assert (first.stage, read_blob(client, first)) == (STAGE, BLOB)
    assert first.why.startswith(CAUSE)
    assert first.size_bytes == len(first.raw_spec) + len(BLOB)
    assert abs(first.died_us / 1e6 - seconds) < 10
    assert spec_of(first) == make_spec("req-1")
    assert drop_letters(client, [first]) == 1
    assert drop_letters(client, [first]) == 0
    assert drop_letters(client, []) == 0
    assert [letter.request for letter in read_letters(client)] == ["req-2"]
    with pytest.raises(
        BadInput, match="no dead letter 'req-1'; `fleet dead-letters list` shows them"
    ):
        read_letter(client, RequestId("req-1"))


def test_oldest_dead_letters_are_removed_beyond_their_bound_of_bytes(client: redis.Redis) -> None:
    create_dead_letters(client, "req-1", "req-2", "req-3", blob=bytes(25 * 2**20))
    newest = [RequestId("req-2"), RequestId("req-3")]
    assert [letter.request for letter in read_letters(client)] == newest
    assert {text(key) for key in client.scan_iter(f"{keys.PREFIX}dead_letter:*")} == set(
        map(keys.dead_letter_blob, newest)
    )


def test_dead_letter_larger_than_the_bound_is_stored(client: redis.Redis) -> None:
    create_dead_letters(client, "req-1", "req-2", blob=bytes(65 * 2**20))
    assert [letter.request for letter in read_letters(client)] == ["req-2"]


def test_listing_dead_letters_moves_no_audio(client: redis.Redis) -> None:
    create_dead_letters(client, *(f"req-{number}" for number in range(10)), blob=bytes(2**20))
    before = cast("dict[str, int]", client.info("stats"))["total_net_output_bytes"]
    assert len(read_letters(client)) == 10
    assert cast("dict[str, int]", client.info("stats"))["total_net_output_bytes"] - before < 2**18


def test_dead_letter_of_another_version_is_listed_but_not_retried(
    redis_url: str, client: redis.Redis
) -> None:
    fields = {
        "request": RequestId("r"),
        "stage": StageName("s"),
        "entry": "1-0",
        "why": "",
        "died_us": 0,
        "size_bytes": 1,
    }
    with pytest.raises(
        UnknownWireVersion, match="the dead letter r was written by another version"
    ):
        spec_of(DeadLetter(**fields, raw_spec=b"\x01"))  # type: ignore[arg-type]
    client.xadd(keys.DEAD, {"r": "req-new", "s": "s", "why": "w", "spec": b"\x01", "n": 1})
    assert "req-new" in fleet_command(redis_url, "list").stdout


def test_dead_letters_list_and_show_name_stage_and_cause(
    redis_url: str, client: redis.Redis
) -> None:
    assert "0 dead letters" in fleet_command(redis_url, "list").stdout
    create_dead_letters(client, "req-1", "req-2")
    listed = fleet_command(redis_url, "list").stdout
    assert "2 dead letters" in listed
    for request in ("req-1", "req-2"):
        (line,) = (line for line in listed.splitlines() if request in line)
        assert STAGE in line and CAUSE[:20] in line
    shown = fleet_command(redis_url, "show", "req-2").stdout.splitlines()
    assert {"id: req-2", f"stage: {STAGE}", "prompt: 3 tokens"} <= set(shown)
    assert any(line.startswith(f"why: {CAUSE}") for line in shown)
    assert any(re.fullmatch(r"size: \d+ bytes", line) for line in shown)


def test_dead_letters_drop_removes_one_or_all(redis_url: str, client: redis.Redis) -> None:
    create_dead_letters(client, "req-1", "req-2", "req-3")
    assert fleet_command(redis_url, "drop", "req-2").stdout == "dropped 1 dead letter\n"
    assert [letter.request for letter in read_letters(client)] == ["req-1", "req-3"]
    for arguments in (("drop",), ("drop", "req-1", "--all")):
        assert isinstance(fleet_command(redis_url, *arguments).exception, BadInput)
    assert fleet_command(redis_url, "drop", "--all").stdout == "dropped 2 dead letters\n"
    assert read_letters(client) == []


def test_dead_letters_retry_submits_the_same_request_and_drops_the_letter_on_success(
    redis_url: str, client: redis.Redis
) -> None:
    create_dead_letters(client, "req-1", "req-2")
    with thread_fleet(redis_url) as fleet:

        async def undisturbed() -> tuple[int, int]:
            async with gateway(fleet) as gateway_client:
                tensors = await answer(gateway_client, make_spec("req-other"), BLOB)
            return len(tensors[EdgeName("text")]), len(tensors[EdgeName("audio")])

        tokens, samples = asyncio.run(undisturbed())
        done = fleet_command(redis_url, "retry", "req-1")
    assert done.exit_code == 0, done.output
    sent, finished = done.stdout.splitlines()
    new = sent.removeprefix("req-1 is sent again as ")
    assert new.startswith("req-") and new != "req-1"
    assert (
        finished
        == f"{new} finished: {tokens} text tokens, {samples} audio samples; the letter is dropped"
    )
    assert tokens > 0 and samples > 0
    assert [letter.request for letter in read_letters(client)] == ["req-2"]


def test_failed_retry_keeps_the_dead_letter(redis_url: str, client: redis.Redis) -> None:
    create_dead_letters(client, "req-1")
    done = fleet_command(redis_url, "retry", "req-1")
    assert done.exit_code == 1
    assert "failed (overloaded): no worker serves the role" in done.stderr
    assert done.stderr.endswith("; the letter stays\n") and len(done.stderr.splitlines()) == 1
    assert isinstance(
        fleet_command(redis_url, "retry", "req-1", "--set", "graph=text").exception, ConfigError
    )
    assert [letter.request for letter in read_letters(client)] == ["req-1"]
    assert client.zcard(keys.WORKERS) == 1, (
        "the command's own gateway is gone; only the test's is left"
    )


async def test_dead_letter_whose_audio_is_gone_is_not_retried_and_stays(
    redis_url: str, client: redis.Redis
) -> None:
    request = RequestId("req-1")
    clip = AudioClip(offset_samples=0, num_samples=4, rate_hz=16_000)
    create_dead_letters(client, request, audio=(clip,))
    client.unlink(keys.dead_letter_blob(request))

    async def submit(*_: object) -> None:
        raise AssertionError("a prompt without its audio is submitted")

    async with connect_async(redis_url) as connection:
        operations = Operations(connection, FleetConfig(), submit)
        with pytest.raises(Conflict, match="the audio of its prompt is deleted"):
            await operations.retry_dead_letter(request)
    assert [letter.request for letter in read_letters(client)] == [request]


@pytest.mark.parametrize(
    "arguments", [(), ("list",), ("show",), ("retry",), ("drop",)], ids=" ".join
)
def test_dead_letters_help_shows_examples(arguments: tuple[str, ...], redis_url: str) -> None:
    done = fleet_command(redis_url, *arguments, "--help")
    assert done.exit_code == 0, done.output
    assert "Example" in done.output if arguments else "Manage dead letters" in done.output


@pytest.mark.parametrize("command", ["show", "retry", "drop"])
def test_unknown_dead_letter_is_a_one_line_error(
    command: str, redis_url: str, tmp_path: Path
) -> None:
    done = run_cli("dead-letters", command, "req-none", cwd=tmp_path, env={"REDIS_URL": redis_url})
    assert done.returncode == 1
    assert done.stderr == "fleet: no dead letter 'req-none'; `fleet dead-letters list` shows them\n"
