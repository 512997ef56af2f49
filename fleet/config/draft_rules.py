"""Rules over speculation and the training of draft heads. There is one function per rule."""

from collections.abc import Iterator

from fleet.config.problems import Problem
from fleet.config.schema import FleetConfig
from fleet.drafts.figures.speculation import EAGLE3, OFF


def drafts_can_be_verified(config: FleetConfig) -> Iterator[Problem]:
    for stage in config.graph_declaration().all_stages:
        own, engine, here = (
            config.stage(stage.name),
            config.engine_of(stage.name),
            ("stages", stage.name, "speculation", "drafter"),
        )
        if own.speculation.drafter == OFF:
            continue
        if not stage.verifies_drafts:
            yield Problem(here, f"no drafter guesses the output of {stage.name}; set off")
        elif engine != "torch":
            yield Problem(
                here,
                f"drafts are verified by the engine torch, not by {engine}; set engine: torch, "
                "or off",
            )
        elif own.spans is not None:
            yield Problem(here, "drafts are not sent to span workers; set off, or remove spans")
        elif (
            own.speculation.drafter == EAGLE3
            and own.speculation.head is None
            and not config.training.enabled
        ):
            message = (
                "eagle3 guesses with a draft head; name its folder, set training.enabled: "
                "true, or another drafter"
            )
            yield Problem((*here[:-1], "head"), message)


def captures_can_be_trained_on(config: FleetConfig) -> Iterator[Problem]:
    training, graph = config.training, config.graph_declaration()
    if not training.enabled:
        return
    main, here = graph.main_stage.name, ("training", "enabled")
    if not graph.optional_stages:
        yield Problem(here, f"the graph {graph.name} declares no trainer; set false")
    engine = config.engine_of(main)
    if engine != "torch":
        yield Problem(
            here,
            f"captures are computed by the engine torch, and {main} has {engine}; set engine: "
            "torch, or false",
        )
    if config.stage(main).spans is not None:
        yield Problem(
            here,
            f"captures are not computed by span workers; remove stages.{main}.spans, or set false",
        )
    if config.transfer.kind == "redis":
        yield Problem(
            here, "rows for training never pass through Redis; set transfer.kind: nixl, or false"
        )
    if training.window_samples % training.batch_samples:
        message = (
            f"{training.window_samples} is no multiple of training.batch_samples, which "
            f"is {training.batch_samples}"
        )
        yield Problem(("training", "window_samples"), message)
    for name in (stage.name for stage in graph.optional_stages):
        own = config.stage(name)
        if own.replicas != 1:
            yield Problem(
                ("stages", name, "replicas"),
                "one trainer is active at a time; set 1, and standby for further ones",
            )
        if own.max_batch < training.window_samples:
            message = (
                "holds fewer samples than a window has (training.window_samples: "
                f"{training.window_samples}); raise it"
            )
            yield Problem(("stages", name, "max_batch"), message)
    if training.replay_samples < training.window_samples:
        message = (
            "holds fewer samples than a window has (training.window_samples: "
            f"{training.window_samples}); raise it"
        )
        yield Problem(("training", "replay_samples"), message)
