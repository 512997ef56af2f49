"""Damaged saved conversations, as files and as messages to a worker: each is refused by name, and
every cached conversation stays.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fleet.core.errors import BadInput, OutOfPages
from fleet.core.ids import PREFILL, RequestId, StageName, WorkerId
from fleet.core.request import Sampling
from fleet.core.session_messages import (
    LoadSession,
    SaveSession,
    SessionEnd,
    SessionInfo,
    SessionPart,
    decode_session_message,
    encode_session_message,
)
from fleet.engine.base import NUM_POSITIONS, EngineInput, EngineRequest
from fleet.engine.capabilities import KVBlocks, SavedSession
from fleet.engine.torch.kv_pool import KVPool
from fleet.engine.torch.lm_engine import LMEngine, LoopLimits
from fleet.engine.torch.pass_queue import LocalPasses
from fleet.engine.torch.passes import FastRunner
from fleet.spans.net.connection import ConnectionClosed, FrameReceived
from fleet.worker.sessions.client import SessionFile
from fleet.worker.sessions.service import SessionService
from tests.capabilities import kv_of, prefixes_of, sessions_of
from tests.support import wait_until
from tests.unit.counting_loop import CountingProgram, CountingTask
from tests.unit.test_session_service import connected

WAIT_S = 20.0
NUM_PAGES, PAGE_SIZE = 16, 2
NUM_ROWS = 6
LAYOUT, ROW_BYTES = "float32, 1 heads of 1", 8
INFO = SessionInfo(num_rows=NUM_ROWS, num_layers=1, layout=LAYOUT, checkpoint="c", stage="lm")
PARTS = {"keys": bytes(8 * NUM_ROWS), "0": bytes(range(ROW_BYTES * NUM_ROWS))}
INFOS = {
    "rows below zero": replace(INFO, num_rows=-1),
    "no rows": replace(INFO, num_rows=0),
    "more rows than any memory": replace(INFO, num_rows=10**12),
    "more rows than the parts": replace(INFO, num_rows=NUM_ROWS + 1),
    "no layers": replace(INFO, num_layers=0),
    "more layers than any model": replace(INFO, num_layers=10**12),
    "rows of another layout": replace(INFO, layout="float32, 1 heads of 2"),
    "an unreadable layout": replace(INFO, layout="rows"),
}
PART_DAMAGES = {
    "keys of 7 bytes": {"keys": bytes(7)},
    "no keys": {"keys": b""},
    "a short layer": {"0": PARTS["0"][:-1]},
    "an empty layer": {"0": b""},
    "a long layer": {"0": PARTS["0"] * 2},
    "an unknown part": {"extra": bytes(8)},
    "positions without tapped rows": {"positions": bytes(4)},
    "tapped rows of a model without": {"positions": bytes(4), "tapped": bytes(8)},
}


def engine_with_a_session() -> LMEngine[CountingTask]:
    """Return an engine that caches the conversation `kept` in half of its KV pages."""
    program = CountingProgram()
    pool = KVPool(
        program.kv_shape,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    limits = LoopLimits(max_batch=4, prefill_chunk_tokens=16)
    engine = LMEngine(program, pool, LocalPasses(FastRunner(program, pool)), limits)
    request = EngineRequest(
        request_id=RequestId("r"),
        sampling=Sampling(max_tokens=1),
        params={NUM_POSITIONS: "16"},
        session="kept",
    )
    engine.submit(request)
    numbers = np.arange(1, 16, dtype=np.int32)
    engine.feed(
        request.request_id, EngineInput(walk=PREFILL, arrays={"numbers": numbers}, final=True)
    )
    wait_until(
        lambda: bool(engine.step()) and prefixes_of(engine).num_rows("kept") > 0, "the turn to end"
    )
    return engine


def check_engine(engine: LMEngine[CountingTask]) -> None:
    """Check that the conversation is still cached, and that no KV page is lost."""
    assert prefixes_of(engine).num_rows("kept") == 15
    engine.pool.check()


@dataclass(slots=True)
class Served:
    """A session service and its engine. `loaded`: conversations that the service announced as
    loaded.
    """

    engine: LMEngine[CountingTask] = field(default_factory=engine_with_a_session)
    loaded: list[str] = field(default_factory=list[str])
    service: SessionService = field(init=False)

    def __post_init__(self) -> None:
        self.service = SessionService(
            sessions_of(self.engine),
            StageName("lm"),
            "c",
            "127.0.0.1",
            WorkerId("w"),
            None,
            self.loaded.append,
        )

    def send(self, *frames: tuple[bytes, bytes]) -> str:
        """Send frames on a new connection; return the error in the answer, or the worker's reason
        for closing the connection.
        """
        connection, arrivals = connected(self.service)
        for header, payload in frames:
            connection.send(header, payload)

        def end() -> str | None:
            self.service.advance()
            for each in arrivals.take(0):
                if isinstance(each, ConnectionClosed):
                    return each.reason
                if isinstance(each, FrameReceived):
                    message = decode_session_message(each.frame.header)
                    if isinstance(message, SessionEnd):
                        return message.error or "done"
            return None

        ended = wait_until(end, "the end of the operation")
        assert ended is not None
        connection.close()
        self.service.advance()
        return ended

    def load(self, info: SessionInfo, parts: dict[str, bytes], session: str = "new") -> str:
        return self.send(*load_frames(info, parts, session))


def load_frames(
    info: SessionInfo, parts: dict[str, bytes], session: str = "new"
) -> list[tuple[bytes, bytes]]:
    named = [
        (encode_session_message(SessionPart(session=session, name=name)), part)
        for name, part in parts.items()
    ]
    start, end = LoadSession(session=session, info=info), SessionEnd(session=session)
    return [(encode_session_message(start), b""), *named, (encode_session_message(end), b"")]


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.service.close()
    check_engine(served.engine)


def saved(
    info: SessionInfo = INFO, keys: int = NUM_ROWS, layers: Sequence[int] = (ROW_BYTES * NUM_ROWS,)
) -> SavedSession:
    """Return a saved session with `keys` row keys, and layers of the sizes `layers`, in bytes."""
    return SavedSession(
        num_rows=info.num_rows,
        keys=np.zeros(keys, np.int64),
        layers=[np.zeros(num, np.uint8) for num in layers],
        layout=info.layout,
    )


@pytest.mark.parametrize("info", INFOS.values(), ids=list(INFOS))
def test_engine_refuses_a_session_that_contradicts_itself(info: SessionInfo) -> None:
    engine = engine_with_a_session()
    with pytest.raises((BadInput, OutOfPages)):
        sessions_of(engine).begin_load("new", saved(info, layers=(48,) * min(info.num_layers, 2)))
    check_engine(engine)


@given(
    rows=st.integers(-2, 40),
    keys=st.integers(0, 40),
    sizes=st.lists(st.integers(0, 400), max_size=2),
)
@settings(max_examples=60)
def test_engine_loads_a_session_or_refuses_it_without_effect(
    rows: int, keys: int, sizes: list[int]
) -> None:
    engine = engine_with_a_session()
    given_session = saved(replace(INFO, num_rows=rows), keys, sizes)
    is_whole = (
        0 < rows <= NUM_PAGES // 2 * PAGE_SIZE and keys == rows and sizes == [ROW_BYTES * rows]
    )
    try:
        sessions_of(engine).begin_load("new", given_session)
        assert is_whole and prefixes_of(engine).num_rows("new") == rows
    except (BadInput, OutOfPages):
        assert not is_whole or rows > NUM_PAGES * PAGE_SIZE
    if rows <= NUM_PAGES // 2 * PAGE_SIZE:
        check_engine(engine)
    engine.pool.check()


def test_session_that_fits_once_others_are_dropped_is_loaded() -> None:
    engine, rows = engine_with_a_session(), NUM_PAGES * PAGE_SIZE
    sessions_of(engine).begin_load(
        "new", saved(replace(INFO, num_rows=rows), rows, [ROW_BYTES * rows])
    )
    assert prefixes_of(engine).num_rows("new") == rows and prefixes_of(engine).num_rows("kept") == 0


def test_whole_session_is_loaded(served: Served) -> None:
    assert served.load(INFO, PARTS) == "done"
    assert served.loaded == ["new"] and prefixes_of(served.engine).num_rows("new") == NUM_ROWS


@pytest.mark.parametrize("info", INFOS.values(), ids=list(INFOS))
def test_worker_refuses_a_session_that_contradicts_itself(
    served: Served, info: SessionInfo
) -> None:
    assert served.load(info, PARTS) != "done" and not served.loaded
    assert served.load(INFO, PARTS) == "done"


@pytest.mark.parametrize("damage", PART_DAMAGES.values(), ids=list(PART_DAMAGES))
def test_worker_refuses_damaged_parts(served: Served, damage: dict[str, bytes]) -> None:
    refusal = served.load(INFO, PARTS | damage)
    assert refusal != "done" and not served.loaded, refusal
    assert served.load(INFO, PARTS) == "done"


@pytest.mark.parametrize("name", PARTS)
def test_worker_refuses_a_session_with_a_part_missing(served: Served, name: str) -> None:
    refusal = served.load(INFO, {given: part for given, part in PARTS.items() if given != name})
    assert f"lacks {name}" in refusal


FRAMES = st.lists(
    st.tuples(
        st.one_of(
            st.binary(max_size=40),
            st.sampled_from([header for header, _ in load_frames(INFO, PARTS)]),
            st.builds(
                lambda header, at, byte: (
                    header[: at % len(header)] + bytes([byte]) + header[at % len(header) + 1 :]
                ),
                st.sampled_from([header for header, _ in load_frames(INFO, PARTS)]),
                st.integers(0, 100),
                st.integers(0, 255),
            ),
            st.just(encode_session_message(SaveSession(session="unknown"))),
        ),
        st.one_of(st.binary(max_size=40), st.sampled_from(list(PARTS.values()))),
    ),
    min_size=1,
    max_size=5,
)


@given(frames=FRAMES)
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_worker_survives_damaged_frames(served: Served, frames: list[tuple[bytes, bytes]]) -> None:
    """A worker survives damaged frames. A command that must be refused follows them, so that the
    worker answers each sequence or closes its connection.
    """
    served.send(
        *frames,
        (encode_session_message(LoadSession(session="x", info=replace(INFO, stage="other"))), b""),
    )
    for session in ("new", "x"):
        prefixes_of(served.engine).drop(session)
    assert served.load(INFO, PARTS) == "done"
    check_engine(served.engine)
    prefixes_of(served.engine).drop("new")


def written(folder: Path, info: SessionInfo = INFO, parts: dict[str, bytes] | None = None) -> Path:
    file = folder / "s.safetensors"
    SessionFile(
        info=info,
        parts={
            name: memoryview(part) for name, part in (PARTS if parts is None else parts).items()
        },
    ).write(file)
    return file


@pytest.mark.parametrize("info", [info for name, info in INFOS.items() if "layout" not in name])
def test_file_with_a_description_of_other_parts_is_refused(
    tmp_path: Path, info: SessionInfo
) -> None:
    with pytest.raises(BadInput, match="is not the file of a session"):
        SessionFile.read(written(tmp_path, info))


@pytest.mark.parametrize(
    "damage", [damage for name, damage in PART_DAMAGES.items() if "tapped rows of a" not in name]
)
def test_file_with_damaged_parts_is_refused(tmp_path: Path, damage: dict[str, bytes]) -> None:
    with pytest.raises(BadInput, match="is not the file of a session"):
        SessionFile.read(written(tmp_path, parts=PARTS | damage))


@given(
    at=st.integers(0, 10**6),
    byte=st.integers(0, 255),
    cut=st.one_of(st.none(), st.integers(0, 10**6)),
)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_file_is_refused(tmp_path: Path, at: int, byte: int, cut: int | None) -> None:
    file = written(tmp_path)
    whole = file.read_bytes()
    at %= len(whole)
    damaged = whole[:at] + bytes([byte]) + whole[at + 1 :]
    file.write_bytes(damaged if cut is None else damaged[: cut % len(whole)])
    if file.read_bytes() == whole:
        assert SessionFile.read(file).info == INFO
        return
    with pytest.raises(BadInput, match="is not the file of a session"):
        SessionFile.read(file)


def test_file_of_other_tensors_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    file = tmp_path / "s.safetensors"
    description = json.dumps(
        {"num_rows": 1, "num_layers": 1, "layout": LAYOUT, "checkpoint": "c", "stage": "lm"}
    )
    save_file(
        {"0": torch.zeros(2, dtype=torch.bfloat16), "keys": torch.zeros(1)},
        file,
        metadata={"fleet_session": description},
    )
    with pytest.raises(BadInput, match="is not the file of a session"):
        SessionFile.read(file)


@given(num_rows=st.integers(-2, 40), num_bytes=st.integers(0, 400))
@settings(max_examples=80, deadline=None)
def test_damaged_hand_off_is_recomputed(num_rows: int, num_bytes: int) -> None:
    """A damaged hand-off is recomputed: KV blocks whose size does not fit the request's positions
    are not imported, and the request is computed from its prompt.
    """
    engine, name = engine_with_a_session(), RequestId("next")
    engine.submit(
        EngineRequest(request_id=name, sampling=Sampling(max_tokens=1), params={NUM_POSITIONS: "8"})
    )
    engine.feed(
        name,
        EngineInput(walk=PREFILL, arrays={"numbers": np.arange(5, dtype=np.int32)}, final=True),
    )
    imported = kv_of(engine).import_blocks(
        name, KVBlocks(num_rows=num_rows, data=np.zeros(num_bytes, np.uint8))
    )
    assert not imported or num_bytes == engine.pool.pages_for(num_rows) * engine.pool.page_bytes
    outputs = [output for _ in range(3) for output in engine.step()]
    sums = [int(output.arrays["sum"][0]) for output in outputs if "sum" in output.arrays]
    assert len(sums) == 1 and (imported or sums == [10])
    engine.pool.check()
