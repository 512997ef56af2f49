"""Input lines are checked before anything is sent; answers are written once, whatever is killed."""

import json
from pathlib import Path

import msgspec
import pytest

from fleet.batches.asking import answers as answers_module
from fleet.batches.asking.answers import AnsweredLine, AnswerFiles, LineError, LineResponse
from fleet.batches.files import FileStore
from fleet.batches.lines import find_faults, read_lines
from fleet.batches.records import ENDPOINTS
from fleet.batches.store import BatchStore
from fleet.config import load_config
from fleet.core.errors import Conflict, NotFound, Overloaded

CHAT = ENDPOINTS[0]


def line(custom_id: object = "a", body: object = None, **fields: object) -> str:
    body = {"model": "m"} if body is None else body
    return json.dumps({"custom_id": custom_id, "url": CHAT, "body": body} | fields)


@pytest.mark.parametrize(
    ("text", "code", "number"),
    [
        (f"{line('a')}\n\n{line('b', method='POST')}\n", "", None),
        ("", "empty_file", None),
        ("\n\n", "empty_file", None),
        (f"{line()}\nno JSON\n", "invalid_json_line", 2),
        (line(priority=1), "invalid_json_line", 1),
        (line(""), "invalid_json_line", 1),
        (line(7), "invalid_json_line", 1),
        (line(method="GET"), "invalid_method", 1),
        (line(url="/v1/embeddings"), "invalid_url", 1),
        (line(url="/v1/audio/speech"), "invalid_url", 1),
        (line(body=[1]), "invalid_body", 1),
        (line(body={"stream": True}), "unsupported_value", 1),
        (line(body={"stream": False, "stream_format": "sse"}), "unsupported_value", 1),
        (f"{line('a')}\n{line('b')}\n{line('a')}", "duplicate_custom_id", 3),
        ("\n".join(line(str(number)) for number in range(6)), "too_many_lines", 6),
    ],
)
def test_input_file_is_checked_line_by_line(
    tmp_path: Path, text: str, code: str, number: int | None
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    num_lines, faults = find_faults(path, (CHAT,), 5)
    assert [(fault.code, fault.line) for fault in faults] == ([(code, number)] if code else [])
    if not code:
        assert [each.custom_id for each in read_lines(path)] == ["a", "b"] and num_lines == 2


def answered(custom_id: str, status: int = 200) -> AnsweredLine:
    response = LineResponse(status_code=status, request_id="r", body=msgspec.Raw(b'{"a":1}'))
    return AnsweredLine(id=f"batch_req_{custom_id}", custom_id=custom_id, response=response)


def files_in(folder: Path) -> AnswerFiles:
    return AnswerFiles(folder / "out", folder / "errors")


@pytest.mark.parametrize("num_bytes", [1, 10, 100])
def test_torn_line_is_removed_and_its_line_is_answered_again(
    tmp_path: Path, num_bytes: int
) -> None:
    files = files_in(tmp_path)
    for custom_id in ("a", "b"):
        files.add(answered(custom_id))
    files.add(answered("c", 400))
    files.add(
        AnsweredLine(id="batch_req_d", custom_id="d", error=LineError(code="lost", message="m"))
    )
    files.close()
    whole = (tmp_path / "out").read_bytes()
    (tmp_path / "out").write_bytes(whole + whole[:num_bytes])
    files = files_in(tmp_path)
    assert files.done == {"a", "b", "c", "d"}
    assert (files.num_completed, files.num_failed) == (2, 2)
    assert (tmp_path / "out").read_bytes() == whole
    files.add(answered("e"))
    with pytest.raises(AssertionError, match="once"):
        files.add(answered("e"))
    files.close()
    written = [json.loads(raw) for raw in (tmp_path / "out").read_text().splitlines()]
    assert [each["custom_id"] for each in written] == ["a", "b", "e"]
    assert written[0] == {
        "id": "batch_req_a",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "r", "body": {"a": 1}},
        "error": None,
    }


@pytest.mark.parametrize("content", ["a note", "a note\n", '{"name": 1}\n', '{"id":"x'])
def test_file_with_other_content_is_refused_and_kept(tmp_path: Path, content: str) -> None:
    (tmp_path / "out").write_text(content)
    with pytest.raises(Conflict, match="no answer to a batch"):
        files_in(tmp_path)
    assert (tmp_path / "out").read_text() == content


def test_one_process_at_a_time_writes_answers(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    with pytest.raises(Conflict, match="another process"):
        files_in(tmp_path)
    files.close()
    files_in(tmp_path).close()


def test_failed_write_leaves_no_part_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = files_in(tmp_path)
    files.add(answered("a"))
    before = (tmp_path / "out").read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(answers_module.os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            files.add(answered("b"))
    assert (tmp_path / "out").read_bytes() == before and files.done == {"a"}
    files.add(answered("b"))
    files.close()


def test_files_expire_are_bounded_and_private(tmp_path: Path) -> None:
    now = [1000.0]
    config = load_config(None, (f"data_dir={tmp_path}", "batches.max_files=2"))
    files = FileStore(config, clock=lambda: now[0])
    short, long = files.add(b"1", "a", 3600), files.add(b"2", "b")
    with pytest.raises(Conflict, match="max_files"):
        files.add(b"3", "c")
    assert [file.id for file in files.files("batch")] == [long.id, short.id]
    assert not files.files("batch_output")
    now[0] += 3601
    with pytest.raises(NotFound):
        files.content(short.id)
    assert [file.id for file in files.files()] == [long.id]
    assert files.content(long.id).read_bytes() == b"2"
    assert not [path for path in tmp_path.rglob("*") if path.stat().st_mode & 0o077]
    for wrong in ("", "..", f"{long.id}/../{long.id}", "file-1"):
        with pytest.raises(NotFound):
            files.find(wrong)


def test_batches_are_listed_cancelled_once_and_forgotten(tmp_path: Path) -> None:
    now = [1000.0]
    config = load_config(None, (f"data_dir={tmp_path}", "batches.max_unfinished=2"))
    store = BatchStore(config, clock=lambda: now[0])
    file = store.files.add(line().encode(), "in.jsonl")
    first, second = (store.create(CHAT, file.id, {"n": "1"}), store.create(CHAT, file.id))
    with pytest.raises(Overloaded, match="max_unfinished"):
        store.create(CHAT, file.id)
    assert store.unfinished() == [first.id, second.id] and store.user_of(file.id) == first.id
    newest, has_more = store.page("", 1)
    assert [each.id for each in newest] == [second.id] and has_more
    older, has_more = store.page(second.id, 1)
    assert [each.id for each in older] == [first.id] and not has_more
    cancelling = store.cancel(first.id)
    now[0] += 5
    assert store.cancel(first.id) == cancelling == store.find(first.id)
    assert (cancelling.status, cancelling.cancelling_at) == ("cancelling", 1000)
    stored = store.load(second.id)
    ended = msgspec.structs.replace(stored.batch, status="completed")
    store.save(msgspec.structs.replace(stored, batch=ended))
    with pytest.raises(Conflict, match="ended already: completed"):
        store.cancel(second.id)
    now[0] += 31 * 24 * 3600
    fresh = store.files.add(b"x", "in.jsonl")
    assert store.create(CHAT, fresh.id).id in store.unfinished()
    with pytest.raises(NotFound):
        store.find(second.id)
