"""What the measure of scale found, as data. Measures nothing."""

import msgspec


class Ages(msgspec.Struct, frozen=True, kw_only=True):
    """How old chunks were when their consumer had them: from the producer's stamp, just before the append, to its hands.

    Units: microseconds, at most 12 % too much (the bounds of `core/hops.py`).
    """

    count: int
    p50_us: int
    p99_us: int


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """One stretch of measuring in which every stream ran from its beginning to its end.

    `chunks` were appended on all edges together. `between_workers` is counted by the workers themselves and told at the renewals
    of their leases, so its window lies up to 1.5 s earlier. `cpu_s` by process name; the load's own CPU is apart, as cores.
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
        """CPU of all processes of the fleet per chunk, in microseconds."""
        return sum(self.cpu_s.values()) / self.chunks * 1e6 if self.chunks else 0.0

    def cost_of_us(self, name: str) -> float:
        return self.cpu_s.get(name, 0.0) / self.chunks * 1e6 if self.chunks else 0.0


class ScalePhase(msgspec.Struct, frozen=True, kw_only=True):
    """So many streams at once. `broken`: what is wrong with each that did not come complete, in order, with the content it must
    have.
    """

    streams: int
    window: Window
    broken: tuple[str, ...] = ()

    @property
    def whole(self) -> int:
        return self.streams - len(self.broken)


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """A role with slots for half of the streams, before and after a second worker of it was started.

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
    def whole(self) -> int:
        return self.streams - len(self.broken)


class ScaleResult(msgspec.Struct, frozen=True, kw_only=True):
    """Every stage makes a row a stream each `step_ms`; each of `num_edges` edges passes on `num_edges` rows a chunk.

    So a stream appends one chunk each `step_ms`, all edges together.
    """

    graph: str
    step_ms: int
    num_edges: int
    phases: tuple[ScalePhase, ...]
    joined: Joined

    def real_time_per_s(self, streams: int) -> float:
        """Chunks a second if all streams keep real time."""
        return streams * 1000 / self.step_ms
