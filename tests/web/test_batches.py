"""/v1/files and /v1/batches with the unmodified OpenAI client, and refusals by name. Batches are
run here against the same gateway.
"""

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch as OpenAIBatch

from fleet.batches.asking.batch_run import BatchRun
from fleet.batches.asking.gateway import LineGateway
from fleet.batches.store import BatchStore
from fleet.control.client import BACKGROUND
from fleet.core.errors import Conflict
from fleet.core.jobs import NO_JOBS
from tests.web.conftest import HELLO, Loaded, ServedGateway, serving
from tests.web.fake_client import Script

CHAT, SPEECH = "/v1/chat/completions", "/v1/audio/speech"
EXPIRY = "output_expires_after.seconds"
OWNER = {"authorization": "Bearer none"}
"""The key of the OpenAI client, which owns what it uploads."""


@pytest.fixture
def store(gateway: ServedGateway) -> Iterator[BatchStore]:
    """The gateway's files and batches, emptied before, since other tests upload to the same
    gateway, and afterwards.
    """
    store = BatchStore(gateway.config)
    empty(store)
    yield store
    empty(store)


def empty(store: BatchStore) -> None:
    for batch_id in list(store.unfinished()):
        store.discard(batch_id)
    for file in store.files.files():
        store.files.discard(file.id)


def upload(gateway: ServedGateway, *lines: dict[str, object], **fields: Any) -> str:
    content = "\n".join(map(json.dumps, lines)).encode()
    file = ("in.jsonl", content)
    return gateway.openai().files.create(file=file, purpose="batch", **fields).id


def line(custom_id: str, url: str = CHAT, **body: object) -> dict[str, object]:
    known: dict[str, object] = {"messages": HELLO} if url == CHAT else {"input": "hello"}
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": url,
        "body": {"model": "omni", **known, **body},
    }


def create(
    gateway: ServedGateway, file_id: str, endpoint: Any = CHAT, **fields: Any
) -> OpenAIBatch:
    return gateway.openai().batches.create(
        input_file_id=file_id, endpoint=endpoint, completion_window="24h", **fields
    )


def test_files_and_batches_of_another_key_do_not_exist(
    gateway: ServedGateway, store: BatchStore
) -> None:
    file_id = upload(gateway, line("a"))
    batch_id = create(gateway, file_id).id
    other = gateway.openai().with_options(api_key="another")
    assert not other.files.list().data and not other.batches.list().data
    for ask in (
        lambda: other.files.retrieve(file_id),
        lambda: other.files.content(file_id),
        lambda: other.files.delete(file_id),
        lambda: other.batches.retrieve(batch_id),
        lambda: other.batches.cancel(batch_id),
        lambda: other.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()
    assert file_id in [file.id for file in gateway.openai().files.list().data]


def run(gateway: ServedGateway, store: BatchStore, batch_id: str) -> None:
    async def work() -> None:
        part = BatchRun(store, batch_id, lambda _: None, max_lines=10, concurrency=2, part_s=60)
        async with LineGateway(gateway.url, None) as connection:
            await part.run(connection)

    asyncio.run(work())


def refusal(answer: httpx.Response) -> tuple[int, str | None]:
    return answer.status_code, answer.json()["error"]["param"]


def test_client_uploads_lists_reads_and_deletes_files(
    gateway: ServedGateway, store: BatchStore
) -> None:
    files = gateway.openai().files
    first = files.create(
        file=("a.jsonl", b"{}"),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    second = files.create(file=("b.jsonl", b"{}\n"), purpose="batch")
    assert (first.bytes, first.filename, first.purpose) == (2, "a.jsonl", "batch")
    assert first.expires_at is not None and first.expires_at - first.created_at == 3600
    assert files.retrieve(first.id) == first
    assert files.content(second.id).read() == b"{}\n"
    assert {file.id for file in files.list(limit=1)} == {first.id, second.id}, "two pages"
    assert [file.id for file in files.list(order="asc")] == [
        file.id for file in reversed(list(files.list(purpose="batch")))
    ]
    assert files.delete(first.id).deleted
    for missing in (first.id, "file-none"):
        with pytest.raises(openai.NotFoundError):
            files.content(missing)


@pytest.mark.parametrize(
    ("data", "files", "param"),
    [
        ({"purpose": "assistants"}, {"file": b"x"}, "purpose"),
        ({}, {"file": b"x"}, "purpose"),
        ({"purpose": "batch"}, {"other": b"x"}, "file"),
        ({"purpose": "batch", "expires_after[seconds]": "60"}, {"file": b"x"}, None),
        ({"purpose": "batch", "folder": "a"}, {"file": b"x"}, "folder"),
    ],
)
def test_wrong_upload_is_refused_by_name(
    gateway: ServedGateway,
    store: BatchStore,
    data: dict[str, str],
    files: dict[str, bytes],
    param: str | None,
) -> None:
    before = store.files.files()
    status, named = refusal(gateway.http.post("/v1/files", data=data, files=files))
    assert status == 400 and (named == param or (param is None and "expires_after" in str(named)))
    assert store.files.files() == before


@pytest.mark.parametrize("name", ["+2AA-", "\\ud800", "xn--a-", "a.jsonl"])
@pytest.mark.parametrize("charset", ["utf-7", "idna", "punycode", "undefined", "unicode_escape"])
def test_form_in_an_unusual_encoding_is_refused_by_name(
    gateway: ServedGateway, charset: str, name: str
) -> None:
    """Python knows these encodings: some fail, some yield names that no answer can carry."""
    raw = (
        '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
        f'Content-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n{{}}\r\n--b--\r\n'
    )
    kind = f"multipart/form-data; boundary=b; charset={charset}"
    answer = gateway.http.post("/v1/files", content=raw, headers={"content-type": kind})
    assert answer.status_code == 400, answer.text
    assert charset in answer.json()["error"]["message"]
    served = kind.replace(charset, "UTF-8")
    assert gateway.http.post("/v1/files", content=raw, headers={"content-type": served}).is_success


def test_upload_is_bounded(loaded: Loaded) -> None:
    batches = loaded.config.batches.model_copy(update={"max_file_mib": 1})
    config = loaded.config.model_copy(update={"batches": batches})
    small = Loaded(checkpoint=loaded.checkpoint, config=config, frontend=loaded.frontend)
    with serving(small) as gateway:
        answer = gateway.http.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": b"x" * (2**20 + 1)}
        )
        assert refusal(answer) == (413, "file")


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"input_file_id": "file-none"}, 404, "file_id"),
        ({"metadata": {str(number): "x" for number in range(17)}}, 400, "metadata"),
        ({"metadata": {"a": "x" * 513}}, 400, "metadata.a"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, EXPIRY),
        ({"priority": 1}, 400, "priority"),
    ],
)
def test_wrong_batch_is_refused_by_name(
    gateway: ServedGateway,
    store: BatchStore,
    changes: dict[str, object],
    status: int,
    param: str,
) -> None:
    before = store.unfinished()
    body = {
        "input_file_id": upload(gateway, line("a")),
        "endpoint": CHAT,
        "completion_window": "24h",
    }
    assert refusal(gateway.http.post("/v1/batches", json=body | changes, headers=OWNER)) == (
        status,
        param,
    )
    assert store.unfinished() == before


def test_batch_runs_at_low_priority_and_its_output_is_downloaded(
    gateway: ServedGateway, store: BatchStore
) -> None:
    gateway.client.script = Script(text="Yes.", num_samples=2000)
    client = gateway.openai()
    file_id = upload(gateway, line("a"), line("b", model="none"), line("c", seed=7))
    batch = create(gateway, file_id, metadata={"k": "v"})
    assert (batch.status, batch.metadata, batch.output_file_id) == ("validating", {"k": "v"}, None)
    assert gateway.client.telemetry.job_list[0].arguments == {"batch": batch.id}
    assert refusal(gateway.http.delete(f"/v1/files/{file_id}", headers=OWNER)) == (409, "file_id")
    run(gateway, store, batch.id)
    batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed" and batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 3, "completed": 2, "failed": 1}
    assert batch.output_file_id is not None and batch.error_file_id is not None
    answers = [json.loads(text) for text in client.files.content(batch.output_file_id).iter_lines()]
    assert {each["custom_id"] for each in answers} == {"a", "c"}
    assert all(each["response"]["body"]["object"] == "chat.completion" for each in answers)
    assert all(each["response"]["body"]["choices"][0]["message"]["content"] for each in answers)
    [failed] = [json.loads(text) for text in client.files.content(batch.error_file_id).iter_lines()]
    assert failed["response"]["status_code"] == 404 and failed["custom_id"] == "b"
    assert gateway.client.client_keys == {BACKGROUND.key}
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
    assert client.files.delete(file_id).deleted


def test_spoken_answers_are_in_the_body_as_base64(
    gateway: ServedGateway, store: BatchStore
) -> None:
    gateway.client.script = Script(text="Yes.", num_samples=2000)
    file_id = upload(gateway, line("a", SPEECH, response_format="wav"))
    batch = create(gateway, file_id, SPEECH)
    run(gateway, store, batch.id)
    found = gateway.openai().batches.retrieve(batch.id)
    assert found.output_file_id is not None
    body = json.loads(store.files.content(found.output_file_id).read_bytes())["response"]["body"]
    assert body["content_type"] == "audio/wav"
    assert base64.b64decode(body["audio"]).startswith(b"RIFF")


def test_cancelled_batch_is_cancelling_until_its_job_ends_it(
    gateway: ServedGateway, store: BatchStore
) -> None:
    batches = gateway.openai().batches
    first = create(gateway, upload(gateway, line("a")))
    second = create(gateway, upload(gateway, line("a")))
    assert [batch.id for batch in batches.list(limit=1)][:2] == [second.id, first.id]
    assert batches.cancel(first.id).status == "cancelling"
    run(gateway, store, first.id)
    assert batches.retrieve(first.id).status == "cancelled"
    with pytest.raises(openai.NotFoundError):
        batches.retrieve("batch_none")


def test_batch_without_a_queue_of_jobs_is_refused(
    gateway: ServedGateway, store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise Conflict(NO_JOBS)

    monkeypatch.setattr(type(gateway.client.jobs), "submit", refuse)
    with pytest.raises(openai.ConflictError, match="Redis"):
        create(gateway, upload(gateway, line("a")))
    assert not store.unfinished()
