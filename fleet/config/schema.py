"""Schema of a deployment file. The defaults suit a laptop; unknown keys are refused.

`stage_schema.py` has the sections of a stage, `web_schema.py` the sections of the gateway; rules
over several values are in `rules.py`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from fleet.config import values
from fleet.config.credits import Credits
from fleet.config.fields import Device, Folder, Items, Mebibytes, Port, Strict, Switch, Text
from fleet.config.roles import DECODE_HALF, PREFILL_HALF, SPAN, Role, part_role_name
from fleet.config.stage_schema import StageConfig
from fleet.config.values import Number, Whole
from fleet.config.web_schema import (
    AlertConfig,
    BatchConfig,
    HistoryConfig,
    TelemetryConfig,
    VoiceConfig,
    WebConfig,
)
from fleet.core.errors import ConfigError
from fleet.core.ids import CLIENT, EdgeName, RoleName, StageName
from fleet.graphs import ALL, DEFAULT_GRAPH, ChunkPolicy, Edge, Graph, get_graph

ARENA_MIB, REQUEST_CAP_MIB = 64, 32
"""Default size in MiB of a worker's arena, and of one request's part of it, without a split stage.
"""
RENEWALS = 5


class PolicyConfig(Strict):
    """Rule by which an edge releases chunks; overrides the `ChunkPolicy` of the graph.

    `ramp`: items per chunk; the last number repeats. All other keys are fields of `ChunkPolicy`;
    None keeps the graph's value.
    """

    kind: Literal["each", "ramp", "all"]
    ramp: Annotated[tuple[Items, ...], Field(validate_default=True)] = ()
    low_buffer_s: Annotated[float, Number(0, 60)] | None = None
    busy_first_chunk_factor: Annotated[int, Whole(1, 1000)] | None = None
    max_chunks_per_s: Annotated[int, Whole(0, 1_000_000)] | None = None

    @field_validator("ramp")
    @classmethod
    def _ramp_given(cls, ramp: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        if info.data.get("kind") == "ramp" and not ramp:
            raise ValueError("kind ramp needs the chunk sizes, such as [2, 4, 8, 16, 25]")
        return ramp


class EdgeConfig(Strict):
    credits: Items | None = None
    policy: PolicyConfig | None = None


class TrainingConfig(Strict):
    """Training of a draft head while answers are served; see `docs/training.md`.

    `enabled`: run the stage `trainer`, and let the main stage compute hidden-state samples to train
    on. `share`: share of answers that gateways turn into samples. `max_in_flight`: samples being
    computed for one gateway or training run. `compute_share`: share of its time that a worker of
    the main stage spends on samples while it computes answers, and for 0.2 s after. `folder`:
    folder for checkpoints and versions, which all trainers must see; None: `drafts` in the data
    folder.

    `window_samples`: samples per optimizer step, computed in batches of `batch_samples`. `passes`:
    how often a sample is trained on, on average. `checkpoint_windows`: most optimizer steps between
    two checkpoints while samples arrive. `replay_samples`, `replay_mib`: size of the buffer of
    samples to train on again. `held_out`: share of samples that are never trained on, and by which
    versions are compared. `promote`: `auto` replaces the version in use by a new one that is better
    by `margin` tokens. `floor`: a version is replaced by its predecessor if the acceptance rate of
    its drafts is below this share of the predecessor's; 0: never.
    """

    enabled: Switch = False
    share: Annotated[float, Number(0, 1)] = 0.0
    max_in_flight: Annotated[int, Whole(1, 4096)] = 16
    compute_share: Annotated[float, Number(0, 1)] = 0.02
    folder: Folder | None = None
    window_samples: Annotated[int, Whole(1, 4096)] = 8
    batch_samples: Annotated[int, Whole(1, 4096)] = 2
    num_steps: Annotated[int, Whole(1, 15)] = 5
    learning_rate: Annotated[float, Number(0, 1, above=True)] = 1e-3
    passes: Annotated[int, Whole(1, 1000)] = 4
    checkpoint_windows: Annotated[int, Whole(1, 100_000)] = 16
    replay_samples: Annotated[int, Whole(1, 10_000_000)] = 2048
    replay_mib: Annotated[int, Whole(1, 16 * 1024 * 1024)] = 1024
    held_out: Annotated[float, Number(0, 1)] = 0.1
    draft_vocab_size: Annotated[int, Whole(1, 1_000_000)] = 32_000
    promote: Literal["manual", "auto"] = "manual"
    margin: Annotated[float, Number(0, 15)] = 0.05
    floor: Annotated[float, Number(0, 1)] = 0.8


class Limits(Strict):
    """Limits of a request, and of the load on the deployment.

    `max_requests`: live requests of the fleet. Further requests wait at their gateway for
    `max_wait_s` at most, up to `max_waiting` requests with `max_waiting_mib` together; beyond them
    the client with the most is answered 429, as is each request that has waited too long.
    `fair_shares`: admit waiting requests of the client with the fewest live requests first, where a
    client is an API key of `web.keys_file` or else an address; False: in the order of arrival at
    each gateway. `share_weights`: weights of addresses or networks; others have 1
    (`web/gateway/shares.py`). `max_unread_bytes`: bytes of an answer, text or audio, that its
    client may leave unread before the request waits for it. `max_transcription_s`: length of a
    recording that is transcribed in pieces, if it is longer than `max_audio_s` and the graph
    recognises speech by itself. `speech_piece_tokens`: longest piece into which a text to speak is
    split; every piece becomes an answer. `max_cached_conversations`: conversations whose KV cache
    each worker retains for the next turn; 0 retains none. `max_redis_memory_percent`: share of
    Redis's `maxmemory`, if set, beyond which new requests are answered with 503.
    """

    max_requests: Items = 64
    max_wait_s: Annotated[float, Number(0, 3600)] = 10.0
    max_waiting: Annotated[int, Whole(0, 100_000)] = 1024
    max_waiting_mib: Mebibytes = 64
    fair_shares: Switch = True
    share_weights: dict[str, Annotated[float, Number(0.01, 100)]] = {}
    max_body_bytes: Annotated[int, Whole(1, 2**32)] = 32 * 1024 * 1024
    max_prompt_tokens: Items = 8192
    max_audio_s: Annotated[float, Number(0, 86_400, above=True)] = 120.0
    max_transcription_s: Annotated[float, Number(0, 86_400)] = 14_400.0
    max_answer_tokens: Items = 4096
    max_messages: Items = 256
    max_speech_chars: Items = 4096
    speech_piece_tokens: Annotated[int, Whole(2, 1_000_000)] = 48
    max_cached_conversations: Annotated[int, Whole(0, 1_000_000)] = 64
    max_unread_bytes: Annotated[int, Whole(1, 2**32)] = 4 * 1024 * 1024
    max_redis_memory_percent: Annotated[float, Number(0, 100, above=True)] = 85.0


class RedisConfig(Strict):
    """Settings of Redis. `data_dir` and `port` belong to the embedded server, which runs only if
    REDIS_URL is not set.

    `data_dir`: folder of the server; None: `redis` in the deployment's data folder. Fleet's
    processes use the Unix socket in it. `port`: TCP port on loopback, where clients need the
    password stored in the same folder; None: no TCP. `wait_replicas`: replicas that must confirm a
    request before it is admitted; without confirmation within `wait_timeout_ms` it is refused.
    """

    data_dir: Folder | None = None
    port: Port | None = None
    wait_replicas: Annotated[int, Whole(0, 16)] = 0
    wait_timeout_ms: Annotated[int, Whole(1, 5000)] = 500


class LeaseConfig(Strict):
    """Leases of processes, and timeouts after which requests move on or fail. Units: seconds.

    `claim_timeout_s`: a grant that no worker has claimed is granted again. `park_after_s`: a task
    that waits for credit for this time gives up its slot until it has credit.
    `no_worker_timeout_s`: a grant fails its request if its role has had no worker for this time and
    has none starting; new requests are refused in the same case. `gateway_timeout_s`: how long a
    request whose gateway is lost waits for another gateway. `prefix_cache_s`: how long a
    conversation's cached prefix is kept; 0 caches nothing.

    `end_hung_processes`: whether a keeper kills and restarts a process that is stopped, or whose
    loop stands still, for two leases of a worker or longer (`fleet.cli.hangs`). `max_step_s`:
    longest time for which a worker's loop may compute without a turn, for example one step of an
    engine.

    Leases are renewed `RENEWALS` times before they lapse; a leader renews on each turn of its loop,
    which takes up to 0.2 s.
    """

    worker_ttl_s: Annotated[float, Number(0.1, 3600)] = 1.25
    conductor_ttl_s: Annotated[float, Number(0.5, 3600)] = 1.5
    claim_timeout_s: Annotated[float, Number(0.1, 3600)] = 2.0
    park_after_s: Annotated[float, Number(0.1, 3600)] = 1.0
    no_worker_timeout_s: Annotated[float, Number(0.1, 86_400)] = 30.0
    gateway_timeout_s: Annotated[float, Number(0.1, 86_400)] = 60.0
    prefix_cache_s: Annotated[float, Number(0, 86_400)] = 60.0
    end_hung_processes: Switch = True
    max_step_s: Annotated[float, Number(1, 86_400)] = 120.0


class TransferConfig(Strict):
    """Transfer of tensors between workers.

    `kind`: `auto` is NIXL where it is installed, else inline through Redis with a warning.
    `interface`: interface, RDMA device, address or network of this host, or a comma-separated list,
    at which workers of other hosts may read tensors; None: only workers of this host and user. See
    `fleet/transfer/reach.py`. `arena_mib`, `request_cap_mib`: size of a worker's arena and of one
    request's part of it; None: 64 and 32, plus a hand-off of the longest prompt on a split stage.
    `buffer_device`: memory from which keys and values on a GPU are handed off; `auto`: the GPU's
    where NIXL can read it, else the host's.
    """

    kind: Literal["auto", "nixl", "redis"] = "auto"
    arena_mib: Mebibytes | None = None
    request_cap_mib: Mebibytes | None = None
    buffer_device: Literal["auto", "cpu", "cuda"] = "auto"
    deadline_s: Annotated[float, Number(0.01, 3600)] = 5.0
    interface: Text | None = None


class SecurityConfig(Strict):
    """Security settings; see `SECURITY.md`. A setting `allow_...` permits one configuration that is
    otherwise refused at start.

    `fleet_secret`: file with a secret that all workers of the fleet share; if set, the workers'
    records carry a MAC.
    """

    fleet_secret: Folder | None = None
    allow_no_key: Switch = False
    allow_redis_without_password: Switch = False
    allow_public_transfer: Switch = False


class FleetConfig(Strict):
    """The configuration of a deployment, as its YAML file declares it.

    `checkpoint`: folder, or name on the model hub, with a sub-folder for each stage if the graph
    says so; `auto`: the graph's shipped checkpoint, or a tiny random one that is written at the
    first start. `hub_cache`: folder of the files of hub names; None: the hub's own cache.
    `worker_nice`: added to the niceness of workers, so that Redis, conductors, gateways and a
    browser on the same machine respond without delay while workers use all cores.
    `preload_workers`: start workers from a fork server.
    """

    graph: Text = DEFAULT_GRAPH
    checkpoint: Text = "auto"
    hub_cache: Folder | None = None
    engine: Literal["torch", "vllm", "fake"] = "torch"
    device: Device = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        BeforeValidator(values.deployment_dtype),
    ] = "auto"
    numerics: Literal["fast", "invariant"] = "fast"
    async_chunk: Switch = True
    transition_source: Literal["producer", "conductor"] = "producer"
    retention_s: Annotated[int, Whole(1, 31_536_000)] = 600
    data_dir: Folder = Path(".fleet")
    worker_nice: Annotated[int, Whole(0, 19)] = 5
    preload_workers: Switch = True
    stages: dict[str, StageConfig] = {}
    edges: dict[str, EdgeConfig] = {}
    limits: Limits = Limits()
    web: WebConfig = WebConfig()
    voice: VoiceConfig = VoiceConfig()
    batches: BatchConfig = BatchConfig()
    history: HistoryConfig = HistoryConfig()
    alerts: AlertConfig = AlertConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    redis: RedisConfig = RedisConfig()
    lease: LeaseConfig = LeaseConfig()
    transfer: TransferConfig = TransferConfig()
    security: SecurityConfig = SecurityConfig()
    training: TrainingConfig = TrainingConfig()

    @property
    def drafts_dir(self) -> Path:
        """The folder of the trainer's checkpoints and of versions of the draft head."""
        return (self.training.folder or self.data_dir / "drafts").absolute()

    @property
    def batches_dir(self) -> Path:
        """The folder of files and batches, which gateways and job workers share."""
        return (self.batches.folder or self.data_dir / "batches").absolute()

    @property
    def history_dir(self) -> Path:
        """The folder of the answers that gateways keep, which all gateways of a host share."""
        return (self.history.folder or self.data_dir / "history").absolute()

    @property
    def sockets_dir(self) -> Path:
        """The folder of Unix sockets at which workers accept connections of this host."""
        return (self.data_dir / "sockets").absolute()

    @property
    def measured_folder(self) -> Path:
        """The folder of the measurements by which workers choose implementations."""
        return (self.data_dir / "measured").absolute()

    @property
    def redis_data_dir(self) -> Path:
        return (self.redis.data_dir or self.data_dir / "redis").absolute()

    def stage(self, name: StageName) -> StageConfig:
        return self.stages.get(name, StageConfig())

    def engine_of(self, name: StageName) -> Literal["torch", "vllm", "ctranslate2", "fake"]:
        return "fake" if self.engine == "fake" else self.stage(name).engine or self.engine

    def dtype_of(self, name: StageName) -> str:
        """Return the configured dtype or precision of a stage; `auto` depends on the device."""
        return self.stage(name).dtype or self.dtype

    def graph_declaration(self) -> Graph:
        return get_graph(self.graph)

    def roles(self) -> tuple[Role, ...]:
        """Return the roles of all stages, in the order of the stages. The trainer's role is among
        them only if training is enabled.
        """
        graph = self.graph_declaration()
        stages = graph.all_stages if self.training.enabled else graph.stages
        return tuple(role for stage in stages for role in self.roles_of(stage.name))

    def roles_of(self, name: StageName) -> tuple[Role, ...]:
        """Return the stage's roles in the order in which a task passes through them."""
        walks, given = self.graph_declaration().stage(name).walks, self.stage(name)
        if given.split is None:
            optional = self.graph_declaration().is_optional(name)
            whole = Role(
                name=RoleName(name),
                stage=name,
                walks=walks,
                replicas=given.replicas,
                standby=given.standby,
                optional=optional,
            )
            return (whole, *self._span_roles(name))
        prefill, decode = given.split.prefill, given.split.decode
        first, last = part_role_name(name, PREFILL_HALF), part_role_name(name, DECODE_HALF)
        return (
            Role(
                name=first,
                stage=name,
                walks=walks[:-1],
                replicas=prefill.replicas,
                standby=prefill.standby,
                next=last,
            ),
            Role(
                name=last,
                stage=name,
                walks=walks[-1:],
                replicas=decode.replicas,
                standby=decode.standby,
            ),
        )

    def _span_roles(self, name: StageName) -> tuple[Role, ...]:
        spans = self.stage(name).spans
        if spans is None or not spans.workers:
            return ()
        role, number = part_role_name(name, SPAN), spans.num_workers * self.stage(name).replicas
        return (
            Role(
                name=role,
                stage=name,
                walks=(),
                replicas=number,
                standby=spans.standby,
                hosts_spans=True,
            ),
        )

    def role(self, name: str) -> Role:
        """Return the role with this name. Raises: ConfigError listing the roles that exist."""
        for role in self.roles():
            if role.name == name:
                return role
        known = ", ".join(role.name for role in self.roles())
        raise ConfigError(
            f"role: this deployment has no role {name!r}; it has {known}", param="role"
        )

    def of_role(self, role: Role) -> StageConfig:
        """Return the settings of a role's workers: the settings of the stage; for one half of a
        split stage, with the values that are set for that half.
        """
        given = self.stage(role.stage)
        if given.split is None:
            return given
        half = given.split.prefill if role.next else given.split.decode
        own = half.model_dump(
            include={"max_batch", "device", "gpu_memory_utilization"}, exclude_none=True
        )
        return given.model_copy(update=own)

    def transition_source_of(self, stage: StageName) -> str:
        return self.stage(stage).transition_source or self.transition_source

    def policy_of(self, edge: Edge) -> ChunkPolicy:
        """Return the chunk policy of an edge. With `async_chunk: false`, every edge sends its whole
        output as one chunk.
        """
        if not self.async_chunk:
            return ALL
        return self._configured_policy(edge)

    def _configured_policy(self, edge: Edge) -> ChunkPolicy:
        given = self.edges.get(edge.name, EdgeConfig()).policy
        return (
            edge.policy
            if given is None
            else replace(edge.policy, **given.model_dump(exclude_none=True))
        )

    def credits_of(self, edge: Edge) -> Credits:
        """Return the bounds of what an edge's producer may send ahead. An edge to the client is
        bounded in bytes; its chunks are bounded only if the configuration sets `credits` for the
        edge, since the log of such an edge is kept whole in any case.
        """
        given = self.edges.get(edge.name, EdgeConfig()).credits
        if edge.target == CLIENT:
            return Credits(chunks=given, num_bytes=self.limits.max_unread_bytes)
        return Credits(chunks=given or edge.credits)

    def window_ramp(self, edge_name: EdgeName) -> tuple[int, ...]:
        """Return the sizes of a codec's decoding windows, which are the edge's ramp. The ramp
        applies with `async_chunk: false` too, since windows depend on the item's index alone.
        """
        edge = self.graph_declaration().edge(edge_name)
        return self._configured_policy(edge).ramp or edge.policy.ramp or (1,)
