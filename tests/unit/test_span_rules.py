"""Mistakes in divisions of a stage's layers, each with its whole error message, with and without
the checkpoint.
"""

from contextlib import nullcontext
from pathlib import Path

import pytest

from fleet.config import FleetConfig, load_config
from fleet.config.placement import for_role
from fleet.config.roles import SPAN, part_role_name
from fleet.config.span_rules import problems_of_spans
from fleet.core.errors import ConfigError
from fleet.core.ids import StageName
from fleet.graphs import GRAPHS, Graph
from fleet.models.causal_lm.tiny import write_tiny_checkpoint
from fleet.spans.route.entry import check_spans
from fleet.worker.main import run_worker

LM = StageName("lm")
SPAN_FORMS = (
    "0:13 (layers 0 to 13), 14:output (layer 14 to the last, and the output head) or "
    "14:last (without the head)"
)
SPANS = "stages.lm.spans"
WHOLE_MODEL = "together with the anchor (14:output), workers must have the whole model"


def divided(anchor: str, *workers: str) -> str:
    return (
        f"{{graph: text, stages: {{lm: {{spans: {{anchor: {anchor}, workers: "
        f"[{', '.join(workers)}]}}}}}}}}"
    )


MISTAKES = (
    (
        "a misspelt key of spans",
        "stages: {talker: {spans: {anchor: 0:13, keep_mb: 64}}}",
        "stages.talker.spans.keep_mb: unknown key; did you mean stages.talker.spans.keep_mib?",
    ),
    (
        "spans in a number format that is not there",
        "stages: {talker: {spans: {anchor: 0:13, wire_dtype: fp16}}}",
        "stages.talker.spans.wire_dtype: 'fp16' is not a known value; use auto, float32, "
        "bfloat16 or float16",
    ),
    (
        "spans without an anchor",
        "{graph: text, stages: {lm: {spans: {workers: [14:output]}}}}",
        f"{SPANS}.workers: the anchor has all layers (0:output); give it fewer, or remove workers",
    ),
    (
        "a number for a span",
        "stages: {talker: {spans: {anchor: 13}}}",
        "stages.talker.spans.anchor: must be text; put it in quotes (got 13)",
    ),
    (
        "a span of another form",
        "stages: {talker: {spans: {anchor: 0-13}}}",
        f"stages.talker.spans.anchor: '0-13' is no span of layers; write {SPAN_FORMS} (got '0-13')",
    ),
    (
        "a span that is turned round",
        "stages: {talker: {spans: {anchor: 0:13, workers: [20:output, 19:14]}}}",
        "stages.talker.spans.workers.1: 19:14 ends before it begins; write 14:19 (got '19:14')",
    ),
    (
        "one span for a list",
        "stages: {talker: {spans: {anchor: 0:13, workers: 14:output}}}",
        "stages.talker.spans.workers: must be a list, such as [14:output] (got '14:output')",
    ),
    (
        "no pass in flight",
        "stages: {talker: {spans: {anchor: 0:13, window: 0}}}",
        "stages.talker.spans.window: must be a whole number from 1 to 64 (got 0)",
    ),
    (
        "a negative size of blocks",
        "stages: {talker: {spans: {anchor: 0:13, nixl_kib: -1}}}",
        "stages.talker.spans.nixl_kib: must be a whole number from 0 to 1048576 (got -1)",
    ),
    (
        "layers on an engine that has them whole",
        "{graph: text, engine: vllm, stages: {lm: {spans: {anchor: 0:output}}}}",
        "stages.lm.spans: the engine vllm cannot divide a model's layers; set engine: torch, or "
        "remove spans",
    ),
    (
        "layers of answers without weights",
        "{graph: text, engine: fake, stages: {lm: {spans: {anchor: 0:output}}}}",
        "stages.lm.spans: the engine fake cannot divide a model's layers; set engine: torch, or "
        "remove spans",
    ),
    (
        "layers of one half of a stage",
        "{graph: text, stages: {lm: {split: {}, spans: {anchor: 0:output}}}}",
        "stages.lm.spans: a stage is divided by layers or by prefill and decode, not by both; "
        "remove spans or split",
    ),
    (
        "rows in half precision with invariant numerics",
        "{graph: text, numerics: invariant, stages: {lm: {spans: {anchor: 0:13, workers: "
        "[14:output], wire_dtype: bfloat16}}}}",
        "stages.lm.spans.wire_dtype: numerics: invariant sends rows in float32, not bfloat16; "
        "set auto or float32",
    ),
    (
        "a GPU given away to an anchor and its span workers",
        "{graph: text, device: cuda, stages: {lm: {gpu_memory_utilization: 0.6, spans: {anchor: "
        "0:13, workers: [14:output]}}}}",
        "stages.lm.gpu_memory_utilization: workers on cuda:0 have 1.2 of it together (1 x 0.6 "
        "lm, 1 x 0.6 lm.span); lower them "
        "to 1 or less, or set another device",
    ),
    (
        "an automatic anchor beside given workers",
        divided("auto", "14:output"),
        f"{SPANS}.anchor: auto is for automatic spans of workers only; set workers: auto, or "
        "write the anchor's span",
    ),
    (
        "automatic spans among given ones",
        divided("0:13", "auto", "20:output"),
        f"{SPANS}.workers: auto stands for all spans of workers; write workers: auto, or each "
        "span (got a list of 2)",
    ),
    (
        "a number of workers beside their spans",
        "{graph: text, stages: {lm: {spans: {anchor: 0:13, workers: [14:output], replicas: 2}}}}",
        f"{SPANS}.replicas: is for automatic spans only; set workers: auto, or remove it",
    ),
    (
        "a memory of workers beside their spans",
        "{graph: text, stages: {lm: {spans: {anchor: 0:13, workers: [14:output], memory_mib: 2}}}}",
        f"{SPANS}.memory_mib: is for automatic spans only; set workers: auto, or remove it",
    ),
    (
        "an anchor with all layers beside automatic workers",
        "{graph: text, stages: {lm: {spans: {anchor: 0:output, workers: auto}}}}",
        f"{SPANS}.workers: the anchor has all layers (0:output); give it fewer, or remove workers",
    ),
    (
        "an automatic worker of another form",
        "{graph: text, stages: {lm: {spans: {workers: automatic}}}}",
        f"{SPANS}.workers: must be a list, such as [automatic] (got 'automatic')",
    ),
    (
        "an output head that the code predictor does not have",
        "stages: {talker: {spans: {anchor: 0:9, workers: [10:14, 15:output]}}}",
        "stages.talker.spans.workers.1: 15:output has the output head, which only the anchor of "
        "talker can have; write 15:last",
    ),
    (
        "a Thinker's layers on an engine that has them whole",
        "stages: {thinker: {engine: vllm, spans: {anchor: 0:13, workers: [14:output]}}}",
        "stages.thinker.spans: the engine vllm cannot divide a model's layers; set engine: "
        "torch, or remove spans",
    ),
    (
        "an anchor amid the layers",
        divided("20:27", "0:19"),
        f"{SPANS}.anchor: 20:27 has neither the embedding nor the output head; an anchor's span "
        "must end with the output head "
        "(20:output) or begin with the embedding (0:27)",
    ),
    (
        "an anchor that lacks only the head",
        divided("5:last", "0:4"),
        f"{SPANS}.anchor: 5:last has neither the embedding nor the output head; an anchor's "
        "span must end with the output head "
        "(5:output)",
    ),
    (
        "workers of an anchor with all layers",
        divided("0:output", "14:20"),
        f"{SPANS}.workers: the anchor has all layers (0:output); give it fewer, or remove workers",
    ),
    (
        "an anchor with all layers and no head",
        divided("0:last"),
        f"{SPANS}.anchor: 0:last leaves the output head to workers, and there are none; write "
        "0:output",
    ),
    (
        "an anchor with the last layers alone",
        divided("14:output"),
        f"{SPANS}.workers: no worker has layers 0 to 13; {WHOLE_MODEL}",
    ),
    (
        "gaps between spans",
        divided("14:output", "0:3", "5:7", "12:12"),
        f"{SPANS}.workers: no worker has layers 4, 8 to 11, 13; {WHOLE_MODEL}",
    ),
    (
        "a gap before the head",
        divided("0:13", "15:output"),
        f"{SPANS}.workers: no worker has layer 14; together with the anchor (0:13), workers "
        "must have the whole model",
    ),
    (
        "spans that overlap and leave gaps",
        divided("14:output", "0:4", "3:9"),
        f"{SPANS}.workers: no worker has layers 0 to 2, 10 to 13; {WHOLE_MODEL}; worker 1 is "
        "not used: 0:4 overlaps 3:9 of "
        "worker 2",
    ),
    (
        "a span over the anchor's layers",
        divided("14:output", "0:20"),
        f"{SPANS}.workers: no worker has layers 0 to 13; {WHOLE_MODEL}; worker 1 is not used: "
        "0:20 overlaps the anchor's layers",
    ),
    (
        "a span that no route needs",
        divided("0:13", "14:20", "21:output", "20:output"),
        f"{SPANS}.workers: worker 3 is not used: 20:output overlaps 14:20 of worker 1; remove it",
    ),
    (
        "spans that no route needs",
        divided("14:output", "0:13", "0:13", "14:20"),
        f"{SPANS}.workers: worker 3 is not used: 14:20 overlaps the anchor's layers; worker 2 "
        "is not used: 0:13 repeats 0:13 of "
        "worker 1; remove them",
    ),
)


def config_of(anchor: str, *workers: str) -> FleetConfig:
    return load_config(
        None,
        ("graph=text", f"stages.lm.spans={{anchor: {anchor}, workers: [{', '.join(workers)}]}}"),
    )


@pytest.mark.parametrize(
    ("text", "message"), [case[1:] for case in MISTAKES], ids=[case[0] for case in MISTAKES]
)
def test_invalid_division_is_refused_in_one_line(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(Path("x.yaml"))
    assert caught.value.message == f"x.yaml: {message}"


@pytest.mark.parametrize(
    ("anchor", "workers"),
    [
        ("0:output", ()),
        ("0:13", ("14:output",)),
        ("0:13", ("14:last",)),
        ("0:13", ("14:27",)),
        ("0:13", ("20:output", "14:19")),
        ("14:output", ("0:13",)),
        ("14:output", ("7:13", "0:6")),
    ],
)
def test_complete_division_is_accepted(anchor: str, workers: tuple[str, ...]) -> None:
    lm, *others = config_of(anchor, *workers).roles()
    assert (lm.name, lm.hosts_spans) == ("lm", False)
    assert [(role.name, role.replicas, role.hosts_spans) for role in others] == [
        ("lm.span", len(workers), True)
    ] * bool(workers)


def test_each_replica_of_an_anchor_has_span_workers_of_its_own() -> None:
    given = (
        "graph=text",
        "stages.lm.replicas=2",
        "stages.lm.spans={anchor: 0:4, workers: [5:9, 10:output], standby: 3}",
    )
    lm, spans = load_config(None, given).roles()
    assert (lm.replicas, spans.replicas, spans.standby) == (2, 4, 3)


@pytest.mark.parametrize(
    ("given", "anchor", "of_ten_layers"),
    [
        ("auto", "auto", "0:2"),
        ("{workers: auto}", "auto", "0:2"),
        ("{workers: [auto], replicas: 3}", "auto", "0:1"),
        ("{workers: auto, anchor: '7:output', replicas: 3}", "7:output", "7:output"),
    ],
)
def test_automatic_division_has_as_many_span_workers_as_it_says(
    given: str, anchor: str, of_ten_layers: str
) -> None:
    """An automatic division has as many span workers as configured. `of_ten_layers`: span of an
    automatic anchor if the model has ten layers. Writing and reading the setting does not change
    the division.
    """
    config = load_config(None, ("graph=text", f"stages.lm.spans={given}"))
    read = FleetConfig.model_validate(config.model_dump(mode="json"))
    for spans in (config.stage(LM).spans, read.stage(LM).spans):
        assert (
            spans is not None
            and spans.is_auto
            and spans.anchor == anchor
            and not spans.worker_spans
        )
        assert spans.of_model(10).anchor == of_ten_layers
        assert not list(problems_of_spans(LM, spans)) and not list(problems_of_spans(LM, spans, 10))
    assert config.role("lm.span").replicas == (3 if "replicas" in given else 1)


def test_automatic_division_of_a_model_with_too_few_layers_is_refused() -> None:
    spans = load_config(None, ("graph=text", "stages.lm.spans=auto")).stage(LM).spans
    assert spans is not None
    (problem,) = problems_of_spans(LM, spans, 1)
    assert problem.message == "the anchor has all layers (0:0); give it fewer, or remove workers"


def test_span_workers_use_the_devices_after_those_of_the_anchors() -> None:
    devices = "stages.lm.device=['cuda:0', 'cuda:1', 'cuda:2']"
    config = load_config(
        None, ("graph=text", "stages.lm.spans={anchor: 0:4, workers: [5:9, 10:output]}", devices)
    )
    used = [
        for_role(config, role, number + 1).stage(LM).device
        for role in config.roles()
        for number in range(role.replicas)
    ]
    assert used == ["cuda:0", "cuda:1", "cuda:2"]


@pytest.mark.parametrize("span", ["10:19", "0:59", "1:1", "23:30"])
def test_span_without_quotes_is_text_and_no_number_of_base_60(span: str, tmp_path: Path) -> None:
    first, last = span.split(":")
    workers = f"0:{int(first) - 1}, {span}" if int(first) else span
    (tmp_path / "x.yaml").write_text(
        f"graph: text\nstages:\n  lm:\n    spans:\n      anchor: {int(last) + 1}:output\n      "
        f"workers: [{workers}]\n"
    )
    spans = load_config(tmp_path / "x.yaml").stage(LM).spans
    assert spans is not None and span in spans.workers


@pytest.mark.parametrize(
    ("stage", "worker"), [("thinker", "10:output"), ("thinker", "10:last"), ("talker", "10:last")]
)
def test_stages_of_qwen3_omni_are_divided(stage: str, worker: str) -> None:
    for anchor, workers in (("0:4", ("5:9", worker)), ("10:output", ("0:4", "5:9"))):
        spans = f"stages.{stage}.spans={{anchor: {anchor}, workers: [{', '.join(workers)}]}}"
        roles = {role.name: role for role in load_config(None, (spans,)).roles()}
        assert roles[part_role_name(StageName(stage), SPAN)].replicas == 2


@pytest.mark.parametrize(
    ("anchor", "workers", "message"),
    [
        ("0:1", ("2:7",), "workers.0: 2:7 names layer 7, but the model's last layer is 2"),
        (
            "0:1",
            ("2:2", "3:output"),
            "workers.1: 3:output names layer 3, but the model's last layer is 2",
        ),
        ("5:output", ("0:4",), "anchor: 5:output names layer 5, but the model's last layer is 2"),
        (
            "0:0",
            ("1:1",),
            "workers: no worker has layer 2; together with the anchor (0:0), workers must have "
            "the whole model",
        ),
    ],
)
def test_division_of_another_model_is_refused_before_anything_is_loaded(
    anchor: str, workers: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    """A division of another model is refused before anything is loaded, although the configuration
    alone is valid: it would fit a model with another number of layers.
    """
    folder, config = write_tiny_checkpoint(tmp_path / "tiny"), config_of(anchor, *workers)
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    for role in ("lm", "lm.span"):
        with pytest.raises(ConfigError) as caught:
            run_worker(config, role, "redis://127.0.0.1:1", folder)
        assert caught.value.message == f"stages.lm.spans.{message} (checkpoint {folder})"


@pytest.mark.parametrize(("stage", "num_layers"), [("thinker", 4), ("talker", 3)])
def test_division_of_qwen3_omni_is_compared_with_its_own_stage(
    stage: str, num_layers: int, tiny_checkpoint: Path
) -> None:
    for last, message in (
        (num_layers - 1, ""),
        (num_layers, f"{num_layers}, but the model's last layer is {num_layers - 1}"),
    ):
        config = load_config(None, (f"stages.{stage}.spans={{anchor: 0:0, workers: [1:{last}]}}",))
        with pytest.raises(ConfigError, match=message) if message else nullcontext():
            check_spans(config, StageName(stage), tiny_checkpoint)


@pytest.mark.parametrize(
    ("anchor", "workers"),
    [("0:1", ("2:output",)), ("2:output", ("0:1",)), ("0:0", ("2:last", "1:1"))],
)
def test_division_of_the_model_is_accepted(
    anchor: str, workers: tuple[str, ...], tmp_path: Path
) -> None:
    check_spans(config_of(anchor, *workers), LM, write_tiny_checkpoint(tmp_path))


def test_spans_beyond_the_model_are_named_before_gaps() -> None:
    spans = config_of("0:1", "2:7").stage(LM).spans
    assert spans is not None
    assert [problem.field for problem in problems_of_spans(LM, spans, 8)] == []
    assert [problem.field for problem in problems_of_spans(LM, spans, 9)] == [
        "stages.lm.spans.workers"
    ]
    assert [problem.field for problem in problems_of_spans(LM, spans, 7)] == [
        "stages.lm.spans.workers.0"
    ]


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_stage_that_can_be_divided_has_its_layers_counted(graph: Graph) -> None:
    for stage in graph.stages:
        assert bool(stage.span_builder) == bool(stage.layer_counter), stage.name
