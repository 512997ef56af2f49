"""The shape of a deployment file. Defaults are what a laptop wants; unknown keys are refused."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fleet.core.ids import EdgeName, StageName
from fleet.graphs import ALL, DEFAULT_GRAPH, ChunkPolicy, Edge, Graph, get_graph

Positive = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]


MAX_ACK_STRIDE = 16


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PolicyConfig(Strict):
    """When an edge releases a chunk. `ramp` counts items per chunk; its last number repeats."""

    kind: Literal["each", "ramp", "all"]
    ramp: tuple[Positive, ...] = ()

    @model_validator(mode="after")
    def _ramp_given(self) -> "PolicyConfig":
        if self.kind == "ramp" and not self.ramp:
            raise ValueError("ramp: give the chunk sizes, such as [2, 4, 8, 16, 25]")
        return self


class EdgeConfig(Strict):
    credits: Positive | None = None
    policy: PolicyConfig | None = None


class StageConfig(Strict):
    """One stage's workers. `threads` x replicas over all stages should not exceed the machine's cores."""

    replicas: Annotated[int, Field(ge=0)] = 1
    max_batch: Positive = 16
    prefill_chunk_tokens: Positive = 256
    kv_pages: Positive = 1024
    page_size_tokens: Positive = 16
    threads: Positive = 1
    device: str | None = None
    transition_source: Literal["producer", "conductor"] | None = None
    sampling: dict[str, float | int] = {}
    extra: dict[str, str | int | float | bool] = {}


class Limits(Strict):
    """What a request may ask for, and how many may run. Beyond `max_requests` live ones the gateway answers 429."""

    max_requests: Positive = 64
    max_body_bytes: Positive = 32 * 1024 * 1024
    max_prompt_tokens: Positive = 8192
    max_audio_s: PositiveFloat = 120.0
    max_answer_tokens: Positive = 4096
    max_messages: Positive = 256


class WebConfig(Strict):
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    model_name: str | None = None


class RedisConfig(Strict):
    """The embedded server, used only where REDIS_URL is not set. `data_dir` null is `redis` under the deployment's own."""

    data_dir: Path | None = None
    port: Annotated[int, Field(ge=0, le=65535)] = 6399


class LeaseConfig(Strict):
    """Units: seconds. A grant nobody claims within `unclaimed_s` is granted again; one whose role has had no worker for
    `no_worker_s` fails its request, so that nobody waits for ever.
    """

    worker_s: PositiveFloat = 3.0
    conductor_s: PositiveFloat = 3.0
    unclaimed_s: PositiveFloat = 2.0
    no_worker_s: PositiveFloat = 30.0


class TransferConfig(Strict):
    """`auto` is NIXL where it is installed, else inline through Redis with a warning."""

    kind: Literal["auto", "nixl", "redis"] = "auto"
    arena_mib: Positive = 64
    request_cap_mib: Positive = 32
    deadline_s: PositiveFloat = 5.0


class FleetConfig(Strict):
    """One deployment. `checkpoint` "auto" makes a tiny random one on first start."""

    graph: str = DEFAULT_GRAPH
    checkpoint: str = "auto"
    engine: Literal["torch", "fake"] = "torch"
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    numerics: Literal["fast", "invariant"] = "fast"
    async_chunk: bool = True
    transition_source: Literal["producer", "conductor"] = "producer"
    retention_s: Positive = 600
    data_dir: Path = Path(".fleet")
    stages: dict[str, StageConfig] = {}
    edges: dict[str, EdgeConfig] = {}
    limits: Limits = Limits()
    web: WebConfig = WebConfig()
    redis: RedisConfig = RedisConfig()
    lease: LeaseConfig = LeaseConfig()
    transfer: TransferConfig = TransferConfig()

    @model_validator(mode="after")
    def _names_exist(self) -> "FleetConfig":
        graph = get_graph(self.graph)
        stages, edges = {s.name for s in graph.stages}, {e.name for e in graph.edges}
        for name in self.stages:
            if name not in stages:
                raise ValueError(f"stages.{name}: graph {graph.name} has no such stage; it has {', '.join(sorted(stages))}")
        for name in self.edges:
            if name not in edges:
                raise ValueError(f"edges.{name}: graph {graph.name} has no such edge; it has {', '.join(sorted(edges))}")
        return self

    @property
    def redis_data_dir(self) -> Path:
        return (self.redis.data_dir or self.data_dir / "redis").absolute()

    def stage(self, name: StageName) -> StageConfig:
        return self.stages.get(name, StageConfig())

    def graph_declaration(self) -> Graph:
        return get_graph(self.graph)

    def transition_source_of(self, stage: StageName) -> str:
        return self.stage(stage).transition_source or self.transition_source

    def policy_of(self, edge: Edge) -> ChunkPolicy:
        """The edge's chunk policy: `async_chunk: false` is "everything at the end" on every edge."""
        if not self.async_chunk:
            return ALL
        given = self.edges.get(edge.name, EdgeConfig()).policy
        return ChunkPolicy(kind=given.kind, ramp=given.ramp) if given else edge.policy

    def credits_of(self, edge: Edge) -> int:
        return self.edges.get(edge.name, EdgeConfig()).credits or edge.credits

    def ack_stride_of(self, edge: Edge) -> int:
        """Chunks a consumer may take before it must acknowledge: well below the credits, or the producer would wait for ever."""
        return max(1, min(MAX_ACK_STRIDE, self.credits_of(edge) // 4))

    def window_ramp(self, edge_name: EdgeName) -> tuple[int, ...]:
        """The ramp of an edge even where `async_chunk` is off: windows are a pure function of the item's index."""
        edge = self.graph_declaration().edge(edge_name)
        given = self.edges.get(edge_name, EdgeConfig()).policy
        policy = ChunkPolicy(kind=given.kind, ramp=given.ramp) if given else edge.policy
        return policy.ramp or edge.policy.ramp or (1,)
