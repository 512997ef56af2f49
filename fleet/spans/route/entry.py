"""A worker process's entry to spans: configuration checks, and the creation of the thread that
keeps an anchor's route. A worker of an undivided stage has no `AnchorRoute`.
"""

from collections.abc import Callable
from pathlib import Path

from fleet.config import FleetConfig
from fleet.config.roles import SPAN, part_role_name
from fleet.config.span_rules import problems_of_spans
from fleet.core.errors import ConfigError
from fleet.core.ids import StageName, WorkerId
from fleet.engine.torch.build import compute_dtype
from fleet.graphs.base import FP8
from fleet.spans.net.ring import block_reads
from fleet.spans.protocol.buffers import PassLimits
from fleet.spans.protocol.chain import RouteSlot
from fleet.spans.protocol.plan import ModelSizes
from fleet.spans.route.division import AutomaticDivision, GivenDivision
from fleet.spans.route.keeper import RouteKeeper, RouteSettings
from fleet.stages.builders import layer_counter
from fleet.stages.options import BuildOptions
from fleet.stages.span_sizes import process_sizes
from fleet.worker.process.peers import PeerAccess

NO_ROUTE_YET = "its span workers have not loaded their layers yet"


def check_spans(config: FleetConfig, stage: StageName, checkpoint: Path) -> None:
    """Check a stage's spans before a worker loads anything.

    Raises: ConfigError if the configured spans do not divide the layers of the checkpoint's model.
    """
    spans = config.stage(stage).spans
    if spans is None:
        return
    num_layers = layer_counter(config.graph_declaration(), stage)(checkpoint)
    problem = next(problems_of_spans(stage, spans, num_layers), None)
    if problem is not None:
        raise ConfigError(
            f"{problem.field}: {problem.message} (checkpoint {checkpoint})", param=problem.field
        )


class AnchorRoute:
    """The settings of an anchor process's route. Every incarnation of the worker opens the route
    anew.
    """

    def __init__(
        self,
        config: FleetConfig,
        options: BuildOptions,
        slot: RouteSlot,
        redis_url: str,
        access: PeerAccess,
    ) -> None:
        """Read the stage's spans, and the layer sizes if spans are chosen automatically.

        `slot`: slot through which the engine receives finished routes. `access`: fleet secret and
        network of connections. Raises: ConfigError if the sizes cannot be read from the checkpoint.
        """
        spans, anchor = config.stage(options.stage).spans, options.anchor
        assert spans is not None and anchor is not None, "a route without span workers"
        self._config = config
        self._stage = options.stage
        self._anchor = anchor
        self._slot = slot
        self._redis_url = redis_url
        self._access = access
        self._spans = spans.of_model(slot.num_layers)
        self._sizes = _layer_sizes(config, options, slot) if spans.is_auto else None

    @property
    def record_fields(self) -> dict[str, str | bytes]:
        """Fields of the anchor's record in Redis while it has no route."""
        return {
            "gap": NO_ROUTE_YET,
            "span": self._spans.anchor,
            "worker_spans": ",".join(map(str, self._spans.worker_spans)),
        }

    def open(self, worker: WorkerId, is_needed: Callable[[], bool]) -> RouteKeeper:
        """Return a route keeper for the worker's incarnation with the id `worker`; the caller
        starts the keeper. `is_needed`: see `RouteKeeper`.
        """
        division = (
            GivenDivision(self._stage, self._spans, self._slot.num_layers)
            if self._sizes is None
            else AutomaticDivision(
                self._stage,
                self._spans,
                self._sizes,
                head_on_anchor=self._anchor.returned == "last_rows",
            )
        )
        settings = RouteSettings(
            anchor=worker,
            stage=self._stage,
            role=part_role_name(self._stage, SPAN),
            division=division,
            sizes=self._sizes,
            returned=self._anchor.returned,
            wire_dtype=self._anchor.wire_dtype,
            keep_bytes=self._anchor.keep_bytes,
            no_worker_timeout_s=self._config.lease.no_worker_timeout_s,
            blocks=block_reads(self._config, self._stage, self._access.reach),
        )
        return RouteKeeper(self._redis_url, settings, self._slot, self._access.secret, is_needed)


def _layer_sizes(config: FleetConfig, options: BuildOptions, slot: RouteSlot) -> ModelSizes:
    """Return the memory that each part of the model needs, for the automatic division of layers."""
    spans = config.stage(options.stage).spans
    assert spans is not None, "a stage without spans"
    limits = PassLimits(
        max_batch=options.own.max_batch,
        prefill_chunk_tokens=options.prefill_chunk_tokens,
        num_positions=slot.num_pages * slot.page_size,
        window=spans.window or spans.num_workers + 2,
        keep_bytes=spans.keep_mib << 20,
    )
    return process_sizes(
        config.graph,
        options.stage,
        options.checkpoint,
        compute_dtype(options.dtype),
        limits=limits,
        page_size=slot.page_size,
        device_kind=options.device.partition(":")[0],
        fp8_experts=options.dtype == FP8,
    )
