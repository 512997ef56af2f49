"""Orders of operators that a worker's engine follows: the choice of a drafter, and the purge of a
trainer's samples.
"""

import logging

from fleet.core.errors import BadInput
from fleet.worker.context import WorkerContext

log = logging.getLogger(__name__)


class EngineOrders:
    def __init__(self, context: WorkerContext) -> None:
        self._engine = context.engine
        self._link = context.link
        self._stage = context.stage
        self._configured = context.config.stage(context.stage).speculation.drafter
        self._refused_drafter = ""
        self._num_purges: int | None = None

    def follow(self) -> None:
        """Read the orders from Redis, and carry out new ones."""
        self._follow_drafter()
        self._follow_purges()

    def _follow_drafter(self) -> None:
        """Make the engine use the drafter that an operator chose, else the configured one."""
        figures, drafters = self._engine.stats().speculation, self._engine.drafters
        if figures is None or drafters is None:
            return
        name = self._link.chosen_drafter(self._stage) or self._configured
        refused = f"{name} with version {figures.head_sha256}"
        is_in_use = name == figures.ordered and (figures.automatic or not figures.failed)
        if is_in_use or name == figures.failed or refused == self._refused_drafter:
            return
        try:
            drafters.use(name)
        except BadInput as error:
            self._refused_drafter = refused
            log.warning(
                "%s cannot draft with %s, and stays with %s: %s",
                self._stage,
                name,
                figures.drafter,
                error.message,
            )
            return
        self._refused_drafter = ""
        log.info("%s drafts with %s, before with %s", self._stage, name, figures.drafter)

    def _follow_purges(self) -> None:
        """Delete a trainer's samples if an operator has ordered it since the last call."""
        samples = self._engine.samples
        if samples is None:
            return
        ordered, self._num_purges = self._num_purges, self._link.num_purges()
        if ordered not in (None, self._num_purges):
            log.info("%d samples of the trainer are forgotten, by order", samples.forget_samples())
