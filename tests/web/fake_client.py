"""A control plane in memory: answers with given text and a sine, fails or stalls where a test says so."""

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
from tokenizers import Tokenizer

from fleet.core.chunk import Chunk, WireTensor
from fleet.core.clock import now_us
from fleet.core.errors import FleetError, GatewayStopping
from fleet.core.hand_off import HandOff
from fleet.core.ids import EdgeName, Epoch, RequestId, StageName, WorkerId
from fleet.core.request import RequestSpec
from fleet.core.request_trace import LIVE_STATES, AudioIn, EdgeTrace, TaskTrace
from fleet.core.request_trace import RequestTrace as Told
from fleet.core.telemetry import WorkerStory
from fleet.graphs import Graph
from tests.web.fake_telemetry import FakeTelemetry

RATE_HZ = 24_000
FRAME_SAMPLES = 1920
TONE_HZ = 440
TEXT, AUDIO = EdgeName("text"), EdgeName("audio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    id: str
    role: str
    host: str = "host"
    pid: int = 1
    started_us: int = 1
    lease_left_s: float = 2.5
    draining: bool = False
    standby: bool = False
    running: int = 0
    capacity: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    role: str
    queue_depth: int = 0
    lag: int = 0
    oldest_s: float = 0.0
    draining: int = 0
    standby: int = 0
    running: int = 0
    capacity: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    stage: str
    state: str
    owner: str
    walk: str = "decode"
    hand_off: HandOff | None = None
    cached_rows: int = 0


@dataclass(slots=True, kw_only=True)
class EdgeCount:
    name: str
    source: str
    target: str
    produced: int = 0
    consumed: int = 0
    items: int = 0


@dataclass(slots=True, kw_only=True)
class Story:
    state: str = "running"
    error: str = ""
    created_us: int = 1
    tasks: tuple[Task, ...] = ()
    edges: tuple[EdgeCount, ...] = ()


@dataclass(slots=True, kw_only=True)
class Script:
    """What the next requests do; an answer that is given is told in place of `text`.

    `gap_s` between chunks; at `stall_at` the stream waits for ever (negative: so many before its end); at `fail_at` it fails.
    `lead_samples` of silence come before the sound.
    `heard`: what sound says, where that is not `text`. `spared`: rows of each task that an earlier turn had computed.
    `refusals`: of which submits `refusal` is the answer. `admission`: the refusal before audio is decoded; `places`: how many
    requests would be admitted.
    """

    text: str = "Hello there, this is the answer."
    heard: str | None = None
    num_samples: int = FRAME_SAMPLES * 5 + 7
    samples_per_chunk: int = FRAME_SAMPLES
    lead_samples: int = 0
    gap_s: float = 0.0
    stall_at: int | None = None
    fail_at: int | None = None
    failure: FleetError | None = None
    refusal: FleetError | None = None
    refusals: range = range(10**9)
    admission: FleetError | None = None
    places: int = 64
    submit_gate: threading.Event | None = None
    end_token: bool = True
    spared: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeHeldVoice:
    epoch: int
    fields: Mapping[str, bytes]
    owner: str = ""
    age_s: float = 0.0
    replaced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeFirstOutputs:
    claimed_us: int | None
    first_us: Mapping[str, int]


class FakeStream:
    def __init__(self, client: "FakeClient", spec: RequestSpec, chunks: Sequence[Chunk], story: Story) -> None:
        self._client = client
        self._chunks = chunks
        self._story = story
        self.request_id = spec.id
        self.aborted: str | None = None
        self.unheard = False
        self.ended = False
        self._parted = asyncio.Event()

    def part(self) -> None:
        self._parted.set()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._run()

    async def _run(self) -> AsyncIterator[Chunk]:
        script = self._client.script
        for number, chunk in enumerate(self._chunks):
            if script.stall_at in (number, number - len(self._chunks)):
                await self._parted.wait()
            if self._parted.is_set():
                raise GatewayStopping("this gateway stops")
            if script.fail_at == number:
                self._story.state = "failed"
                raise script.failure or FleetError("it broke")
            await _pass(script.gap_s)
            for edge in self._story.edges:
                if edge.name == chunk.edge or edge.target != "client":
                    edge.produced = edge.consumed = edge.items = edge.produced + 1
            yield chunk
        self._story.state = "finished"
        self._story.tasks = tuple(replace(task, state="finished") for task in self._story.tasks)
        self.ended = True

    async def abort(self, reason: str) -> None:
        if not self.ended and self.aborted is None:
            self.aborted = reason
            self._story.state = "aborted"

    def run_on(self) -> None:
        if not self.ended and self.aborted is None:
            self.unheard = self.ended = True
            self._story.state = "finished"


@dataclass(slots=True)
class FakeLogins:
    """Satisfies `web.ports.LoginPort`. A lookup waits for `gate` where there is one; its answer is read before."""

    ends: dict[str, int] = field(default_factory=dict[str, int])
    reach: Callable[[], None] = lambda: None
    gate: asyncio.Event | None = None
    num_asked: int = 0
    num_renewed: int = 0

    async def add(self, name: str, keep_s: int) -> None:
        self.reach()
        self.ends[name] = now_us() + keep_s * 1_000_000

    async def ends_us(self, name: str) -> int | None:
        self.reach()
        self.num_asked += 1
        ends_us = self.ends.get(name)
        if self.gate is not None:
            await self.gate.wait()
        return ends_us

    async def renew(self, name: str, keep_s: int) -> None:
        self.reach()
        self.num_renewed += 1
        if name in self.ends:
            self.ends[name] = now_us() + keep_s * 1_000_000

    async def remove(self, name: str) -> None:
        self.reach()
        self.ends.pop(name, None)


@dataclass(slots=True)
class FakeClient:
    """Satisfies `web.ports.FleetPort`."""

    graph: Graph
    tokenizer: Tokenizer
    script: Script = field(default_factory=Script)
    submitted: list[tuple[RequestSpec, bytes | None]] = field(default_factory=list[tuple[RequestSpec, bytes | None]])
    streams: dict[str, FakeStream] = field(default_factory=dict[str, FakeStream])
    stories: dict[str, Story] = field(default_factory=dict[str, Story])
    transcripts: dict[str, str] = field(default_factory=dict[str, str])
    missing: list[str] = field(default_factory=list[str])
    waiting: list[Role] = field(default_factory=list[Role])
    telemetry: FakeTelemetry = field(default_factory=FakeTelemetry)
    unreachable: FleetError | None = None
    id: str = "gateway@host:2:b"
    held: dict[str, FakeHeldVoice] = field(default_factory=dict[str, FakeHeldVoice])
    ended: set[str] = field(default_factory=set[str])
    secrets: dict[str, bytes] = field(default_factory=dict[str, bytes])
    logins: FakeLogins = field(default_factory=FakeLogins)
    num_asked: int = 0
    num_kept: int = 0
    """Number of writes of voice sessions."""
    num_checked: int = 0

    def __post_init__(self) -> None:
        self.logins.reach = self._reach
        self.tell(self.telemetry)

    def tell(self, telemetry: FakeTelemetry) -> None:
        """Have people see this; what it leaves empty is what has happened here."""
        self.telemetry = telemetry
        self.telemetry.unreachable_of = lambda: self.unreachable
        self.telemetry.story_of = self._told
        self.telemetry.workers_of = self._worker_stories
        self.telemetry.on_retry = self._send_again

    def _send_again(self, request: RequestId, again: RequestId) -> None:
        """What of it has a stream here can be resumed."""
        found = next(((spec, blob) for spec, blob in self.submitted if spec.id == request), None)
        if found is not None:
            spec = msgspec.structs.replace(found[0], id=again, retry_of=request)
            self.submitted.append((spec, found[1]))
            self.stories[again] = self._story(spec)
            self.streams[again] = FakeStream(self, spec, self._chunks(spec), self.stories[again])

    def _told(self, request: RequestId) -> Told | None:
        """What has become of a request that was submitted here."""
        story = self.stories.get(request)
        if story is None:
            return None
        spec = next(spec for spec, _ in self.submitted if spec.id == request)
        return Told(
            id=request, graph=spec.graph, state=story.state, kind=spec.kind, model=spec.model, code="", error=story.error or None,
            param="", created_us=story.created_us, ended_us=0, now_us=story.created_us, session=spec.session,
            retry_of=spec.retry_of, body=spec.body, outputs=spec.outputs, params=spec.params, sampling=spec.sampling,
            prompt_ids=spec.prompt_ids, audio=tuple(AudioIn(duration_s=c.num_samples / c.rate_hz) for c in spec.audio),
            tasks=tuple(_task_story(task) for task in story.tasks), edges=tuple(_edge_story(edge) for edge in story.edges),
        )  # fmt: skip

    async def submit(self, spec: RequestSpec, blob: bytes | None) -> FakeStream:
        gate = self.script.submit_gate
        while gate is not None and not gate.is_set():
            await _pass(0.01)
        self.num_asked += 1
        if self.script.refusal is not None and self.num_asked - 1 in self.script.refusals:
            raise self.script.refusal
        self.submitted.append((spec, blob))
        self.stories[spec.id] = self._story(spec)
        self.streams[spec.id] = FakeStream(self, spec, self._chunks(spec), self.stories[spec.id])
        return self.streams[spec.id]

    async def check_admission(self, request: RequestId, outputs: tuple[EdgeName, ...]) -> int:
        self._reach()
        self.num_checked += 1
        if self.script.admission is not None:
            raise self.script.admission
        return self.script.places

    async def resume(self, request: RequestId) -> tuple[RequestSpec, FakeStream] | None:
        """Whoever held it gets no more; the answer is told from its first chunk."""
        self._reach()
        held = self.streams.get(request)
        if held is None:
            return None
        held.ended = True
        spec = next(spec for spec, _ in self.submitted if spec.id == request)
        self.streams[request] = FakeStream(self, spec, self._chunks(spec), self.stories[request])
        return spec, self.streams[request]

    def detach_all(self) -> None:
        for stream in self.streams.values():
            stream.part()

    def _story(self, spec: RequestSpec) -> Story:
        edges = self.graph.edges_for(spec.outputs)
        return Story(
            tasks=tuple(
                Task(stage=s, state="running", owner=f"{s}@host", cached_rows=self.script.spared)
                for s in self.graph.stages_for(spec.outputs)
            ),
            edges=tuple(EdgeCount(name=e.name, source=e.source, target=e.target) for e in edges),
        )

    def _chunks(self, spec: RequestSpec) -> list[Chunk]:
        """Text and sound take turns, as in life; finals last on each edge."""
        text = self._text_chunks(spec) if TEXT in spec.outputs else []
        audio = self._audio_chunks(spec) if AUDIO in spec.outputs else []
        mixed: list[Chunk] = []
        for number in range(max(len(text), len(audio))):
            mixed += text[number : number + 1] + audio[number : number + 1]
        return mixed

    def _text_chunks(self, spec: RequestSpec) -> list[Chunk]:
        main = next(stage.name for stage in self.graph.stages if stage.main)
        text = self.script.text
        if self.script.heard is not None and spec.kind != "voice" and spec.audio:
            text = self.script.heard
        ids = list(spec.given) or list(self.tokenizer.encode(text).ids)[: spec.sampling[main].max_tokens]
        if self.script.end_token and not spec.given:
            end = self.tokenizer.token_to_id("<|im_end|>")
            assert end is not None
            ids.append(end)
        return [
            _chunk(spec, TEXT, index, "ids", "int32", np.asarray([token], "<i4"), final=index == len(ids) - 1)
            for index, token in enumerate(ids)
        ]

    def _audio_chunks(self, spec: RequestSpec) -> list[Chunk]:
        wave = np.concatenate([np.zeros(self.script.lead_samples, "<i2"), sine(self.script.num_samples)])
        size = self.script.samples_per_chunk
        cuts = [wave[start : start + size] for start in range(0, len(wave), size)]
        chunks = [_chunk(spec, AUDIO, n, "pcm", "int16", cut, final=False) for n, cut in enumerate(cuts)]
        return [*chunks, Chunk(request=spec.id, edge=AUDIO, index=len(cuts), epoch=Epoch(1), final=True)]

    async def workers(self) -> list[Worker]:
        self._reach()
        gateway = Worker(id="gateway@host:2:b", role="")
        return [*(self._worker(stage.name) for stage in self.graph.stages if stage.name not in self.missing), gateway]

    def _worker_stories(self) -> list[WorkerStory]:
        present = [stage.name for stage in self.graph.stages if stage.name not in self.missing]
        views = [*(self._worker(role) for role in present), Worker(id="gateway@host:2:b", role="")]
        return [
            WorkerStory(
                id=WorkerId(view.id), role=view.role, host=view.host, pid=view.pid, state="ready", started_us=view.started_us,
                lease_left_s=view.lease_left_s, running=view.running, capacity=view.capacity,
            )
            for view in views
        ]  # fmt: skip

    def _worker(self, role: str) -> Worker:
        running = sum(1 for story in self.stories.values() if story.state == "running")
        return Worker(id=f"{role}@host:1:a", role=role, running=running)

    async def roles(self) -> list[Role]:
        self._reach()
        return self.waiting

    async def missing_roles(self) -> list[str]:
        self._reach()
        return self.missing

    async def request_view(self, request: RequestId) -> Story | None:
        self._reach()
        return self.stories.get(request)

    async def abort_request(self, request: RequestId) -> bool:
        stream = self.streams.get(request)
        if stream is None or stream.ended or stream.aborted is not None:
            return False
        await stream.abort("cancelled through the API")
        return True

    async def first_outputs(self, request: RequestId) -> FakeFirstOutputs:
        self._reach()
        return FakeFirstOutputs(claimed_us=None, first_us={})

    async def hold_voice(self, session: str, keep_s: float, owner: str, *, new: bool = False) -> FakeHeldVoice | None:
        """The bound of a secret's sessions is tested on Redis."""
        self._reach()
        held = self.held.get(session)
        if (held is not None) == new or (held is not None and held.owner != owner):
            return None
        self.held[session] = replace(held, epoch=held.epoch + 1) if held else FakeHeldVoice(epoch=1, fields={}, owner=owner)
        return self.held[session]

    async def keep_voice(
        self, session: str, epoch: int, keep_s: float, fields: Mapping[str, bytes], gone: Sequence[str] = ()
    ) -> bool:
        self._reach()
        self.num_kept += 1
        held = self.held.get(session)
        if held is None or held.epoch != epoch:
            return False
        kept = {name: value for name, value in held.fields.items() if name not in gone}
        self.held[session] = replace(held, fields={**kept, **fields})
        return True

    async def end_voice(self, session: str, epoch: int | None = None) -> bool:
        self._reach()
        held = self.held.get(session)
        if held is None or epoch not in (None, held.epoch):
            return False
        del self.held[session]
        if epoch is None:
            self.ended.add(session)
        return True

    async def voice_ended(self, session: str, owner: str) -> bool:
        self._reach()
        return session in self.ended

    async def voices(self) -> dict[str, bytes]:
        self._reach()
        return {name: held.fields["view"] for name, held in self.held.items() if "view" in held.fields}

    async def keep_secret(self, name: str, value: bytes, keep_s: int) -> None:
        self._reach()
        self.secrets[name] = value

    async def secret(self, name: str) -> bytes | None:
        self._reach()
        return self.secrets.get(name)

    async def ping(self) -> bool:
        return self.unreachable is None

    async def keep_transcript(self, audio_id: str, transcript: str, keep_s: int) -> None:
        self._reach()
        self.transcripts[audio_id] = transcript

    async def transcript(self, audio_id: str) -> str | None:
        self._reach()
        return self.transcripts.get(audio_id)

    async def live_count(self) -> int:
        self._reach()
        told = [*self.stories.values(), *self.telemetry.rows]
        return sum(1 for one in told if one.state in LIVE_STATES)

    def _reach(self) -> None:
        if self.unreachable is not None:
            raise self.unreachable


def _task_story(task: Task) -> TaskTrace:
    return TaskTrace(
        stage=StageName(task.stage), state=task.state, role=task.stage, owner=task.owner, walk=task.walk, epoch=Epoch(1),
        cached_rows=task.cached_rows, hand_off=task.hand_off,
    )  # fmt: skip


def _edge_story(edge: EdgeCount) -> EdgeTrace:
    return EdgeTrace(
        name=EdgeName(edge.name), source=StageName(edge.source), target=StageName(edge.target), produced=edge.produced,
        consumed=edge.consumed, items=edge.items,
    )  # fmt: skip


async def _pass(seconds: float) -> None:
    """The pace of a real answer."""
    loop = asyncio.get_running_loop()
    tick = loop.create_future()
    loop.call_later(seconds, lambda: tick.done() or tick.set_result(None))
    await tick


def sine(num_samples: int) -> np.ndarray:
    wave = np.sin(2 * math.pi * TONE_HZ * np.arange(num_samples) / RATE_HZ)
    return (wave * 10_000).astype("<i2")


def _chunk(spec: RequestSpec, edge: EdgeName, index: int, name: str, dtype: str, data: np.ndarray, *, final: bool) -> Chunk:
    tensor = WireTensor(dtype=dtype, shape=data.shape, data=data.tobytes())
    return Chunk(request=spec.id, edge=edge, index=index, epoch=Epoch(1), tensors={name: tensor}, final=final)
