"""Results of the scale benchmark. Measures nothing."""

import msgspec


class Ages(msgspec.Struct, frozen=True, kw_only=True):
    """Ages of chunks on arrival: from the producer's timestamp, just before the append, to the consumer.

    Units: microseconds, at most 12 % too high (the bounds of `core/hops.py`).
    """

    count: int
    p50_us: int
    p99_us: int


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """One measured window, during all of which every stream ran.

    `chunks`: appended on all edges together. `between_workers`: counted by the workers and reported when they renew their leases,
    so its window is up to 1.5 s earlier. `cpu_s`: by process name. `generator_cores`: CPU of the load generator.
    """

    seconds: float
    chunks: int
    between_workers: Ages | None
    to_gateway: Ages | None
    cpu_s: dict[str, float]
    generator_cores: float
    others_cores: float

    @property
    def chunks_per_s(self) -> float:
        return self.chunks / self.seconds

    @property
    def cost_us(self) -> float:
        """CPU of all processes of the fleet per chunk."""
        return sum(self.cpu_s.values()) / self.chunks * 1e6 if self.chunks else 0.0

    def cost_of_us(self, name: str) -> float:
        return self.cpu_s.get(name, 0.0) / self.chunks * 1e6 if self.chunks else 0.0


class ScalePhase(msgspec.Struct, frozen=True, kw_only=True):
    """One count of concurrent streams. `broken`: the fault of each stream that was not complete, in order and as expected."""

    streams: int
    window: Window
    broken: tuple[str, ...] = ()

    @property
    def complete(self) -> int:
        return self.streams - len(self.broken)


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """A role with slots for half of the streams, before and after the start of a second worker.

    `start_s`: from the start of its process to the first chunk of the last stream.
    """

    role: str
    slots: int
    streams: int
    alone: Window
    together: Window
    start_s: float
    broken: tuple[str, ...] = ()

    @property
    def complete(self) -> int:
        return self.streams - len(self.broken)


class ScaleResult(msgspec.Struct, frozen=True, kw_only=True):
    """Every stage produces a row per stream every `step_ms`; each of `num_edges` edges carries `num_edges` rows per chunk.

    Hence a stream appends one chunk every `step_ms`, all edges together.
    """

    graph: str
    step_ms: int
    num_edges: int
    phases: tuple[ScalePhase, ...]
    joined: Joined

    def real_time_per_s(self, streams: int) -> float:
        """Chunks per second if all streams keep real time."""
        return streams * 1000 / self.step_ms
