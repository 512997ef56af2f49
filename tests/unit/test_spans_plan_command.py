"""`fleet spans plan`, which reads configuration and weight-file headers but no weights: spans that
cover the model, missing memory, refusals.
"""

import json
import resource
import struct
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import Qwen3Config
from typer.testing import CliRunner, Result

from fleet.cli.deployment import open_deployment
from fleet.cli.main import app
from fleet.config.span_rules import problems_of_spans
from fleet.core.byte_sizes import format_byte_size, option_of_byte_size, parse_byte_size
from fleet.core.errors import ConfigError
from fleet.core.ids import StageName, WorkerId
from fleet.graphs.text import LM
from fleet.models.causal_lm.tiny import write_tiny_checkpoint
from fleet.models.checkpoint import INDEX, SINGLE
from fleet.models.qwen3_omni.full_size import published_config
from fleet.spans.protocol.buffers import PROCESS_BYTES, PassLimits, buffer_bytes
from fleet.spans.protocol.layers import LayerSpan, plan_route
from fleet.stages.builders import build_options
from fleet.stages.span_sizes import span_sizes
from tests.support import REPO

pytestmark = pytest.mark.one_file_in(3, "parts with processes")

TEXT_CONFIG = str(REPO / "configs" / "text.yaml")
MIB = 1 << 20
LARGE_LAYERS, LARGE_HIDDEN = 24, 4096
BYTES_BY_DTYPE = {"BF16": 2, "F32": 4}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


def write_large(
    folder: Path, dtype: str = "BF16", *, lacks: str = "none", intermediate_size: int = 11008
) -> Path:
    """Write a model of gigabytes: its configuration, and a sparse weight file with a real header.

    `lacks`: part of a weight's name; weights with such names are omitted. `intermediate_size`:
    value in config.json, while the shapes in the weight file are for 11008.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=LARGE_HIDDEN,
        intermediate_size=intermediate_size,
        num_hidden_layers=LARGE_LAYERS,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"],
    )
    config.save_pretrained(folder)
    layer = {
        "self_attn.q_proj": (4096, 4096),
        "self_attn.k_proj": (1024, 4096),
        "self_attn.v_proj": (1024, 4096),
        "self_attn.o_proj": (4096, 4096),
        "self_attn.q_norm": (128,),
        "self_attn.k_norm": (128,),
        "mlp.gate_proj": (11008, 4096),
        "mlp.up_proj": (11008, 4096),
        "mlp.down_proj": (4096, 11008),
        "input_layernorm": (4096,),
        "post_attention_layernorm": (4096,),
    }
    shapes = {
        f"model.layers.{n}.{name}.weight": shape
        for n in range(LARGE_LAYERS)
        for name, shape in layer.items()
    }
    shapes |= {
        "model.embed_tokens.weight": (32_000, 4096),
        "lm_head.weight": (32_000, 4096),
        "model.norm.weight": (4096,),
    }
    write_hollow(
        folder / SINGLE, {name: shape for name, shape in shapes.items() if lacks not in name}, dtype
    )
    return folder


def write_hollow(path: Path, shapes: dict[str, tuple[int, ...]], dtype: str) -> None:
    """Write a sparse safetensors file, whose weights have the right size but take no disk space."""
    header: dict[str, object] = {}
    stop = 0
    for name, shape in shapes.items():
        start, stop = stop, stop + prod(shape) * BYTES_BY_DTYPE[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with path.open("r+b") as file:
        file.truncate(8 + len(text) + stop)


def invoke(folder: Path, *options: str, memory: Sequence[str]) -> Result:
    budgets = [argument for each in memory for argument in ("--memory", each)]
    arguments = [
        "spans",
        "plan",
        "--config",
        TEXT_CONFIG,
        "--checkpoint",
        str(folder),
        *budgets,
        *options,
    ]
    return CliRunner().invoke(app, arguments)


def planned(folder: Path, *options: str, memory: Sequence[str]) -> dict[str, Any]:
    done = invoke(folder, *options, "--json", memory=memory)
    assert not done.exception or isinstance(done.exception, SystemExit), done.exception
    return json.loads(done.stdout)


def refusal(folder: Path, *options: str, memory: Sequence[str]) -> ConfigError:
    error = invoke(folder, *options, memory=memory).exception
    assert isinstance(error, ConfigError), error
    return error


@pytest.mark.parametrize("anchor", ["first", "last"])
def test_printed_spans_cover_all_layers_and_are_accepted_as_configuration(
    anchor: str, tmp_path: Path
) -> None:
    done = invoke(
        write_large(tmp_path / "model"),
        "--anchor",
        anchor,
        "--dtype",
        "bfloat16",
        memory=["8GiB", "7GiB", "4GiB"],
    )
    assert done.exit_code == 0, done.output
    file = tmp_path / "fleet.yaml"
    file.write_text("graph: text\n" + done.output.partition("Add to the deployment file:\n")[2])
    config = open_deployment(file, ["device=cpu"]).config
    spans = config.stage(LM).spans
    assert (
        spans is not None
        and config.dtype == "bfloat16"
        and config.checkpoint == str(tmp_path / "model")
    )
    workers = {WorkerId(each): LayerSpan.parse(each, "workers") for each in spans.workers}
    route = plan_route(spans.anchor_span, workers, LARGE_LAYERS)
    assert route.is_complete and not route.unused and len(route.hops) == 2
    assert (spans.anchor_span.first == 0) == (
        anchor == "first"
    ) and spans.anchor_span.has_output == (anchor == "last")


def test_printed_workers_are_quoted_so_that_any_reader_of_yaml_reads_spans(tmp_path: Path) -> None:
    made = planned(write_large(tmp_path), "--dtype", "bfloat16", memory=["8GiB"] * 4)
    spans = yaml.safe_load(made["configuration"])["stages"]["lm"]["spans"]
    assert [spans["anchor"], *spans["workers"]] == [each["span"] for each in made["spans"]]


def test_table_has_each_process_with_its_bytes_and_fill(tiny: Path) -> None:
    made = planned(tiny, memory=["1GiB", "900MiB"])
    output = invoke(tiny, memory=["1GiB", "900MiB"]).stdout
    rows = {
        line.split()[0]: line
        for line in output.splitlines()
        if line.strip().startswith(("anchor", "worker"))
    }
    for name, each in zip(("anchor", "worker"), made["spans"], strict=True):
        shown = (
            each["span"],
            *(
                format_byte_size(each[f"{part}_bytes"])
                for part in ("weight", "kv", "buffer", "num", "budget")
            ),
        )
        assert (
            all(part in rows[name] for part in shown) and "█" in rows[name] and " % " in rows[name]
        )
    assert "0:1" in rows["anchor"] and "2:output" in rows["worker"]


def test_bytes_are_those_of_weights_keys_values_and_buffers(tiny: Path) -> None:
    made = planned(tiny, "--positions", "1600", memory=["1GiB", "1GiB"])
    config = open_deployment(Path(TEXT_CONFIG), None).config
    options = build_options(config, LM, tiny)
    import torch

    sizes = span_sizes(
        "text",
        LM,
        tiny,
        torch.float32,
        num_positions=1616,
        buffer_bytes=made["spans"][0]["buffer_bytes"],
    )
    assert (
        made["num_positions"] == 1600
        and made["kv_pages"] == 100
        and made["dtype"] == options.dtype == "float32"
    )
    for each, is_anchor in zip(made["spans"], (True, False), strict=True):
        span = LayerSpan.parse(each["span"], "span").of_model(3, "span")
        assert each["num_bytes"] == sizes.bytes_of(span, is_anchor=is_anchor)
        assert each["num_bytes"] == each["weight_bytes"] + each["kv_bytes"] + each["buffer_bytes"]
        assert each["kv_bytes"] == 1616 * 2 * 2 * 32 * 4 * (span.final - span.first + 1)


def test_positions_and_precision_are_by_default_those_of_a_worker(tiny: Path) -> None:
    made = planned(tiny, memory=["1GiB", "1GiB"])
    assert (made["num_positions"], made["kv_pages"], made["dtype"]) == (16 * 1024, 1024, "float32")
    configured = planned(tiny, "--set", "stages.lm.kv_pages=600", memory=["1GiB", "1GiB"])
    assert configured["num_positions"] == 9600 and "kv_pages" not in configured["configuration"]
    gpu = planned(tiny, "--set", "device=cuda", memory=["1GiB", "1GiB"])
    assert (gpu["device"], gpu["dtype"], gpu["num_positions"]) == ("cuda", "bfloat16", 8208)
    assert yaml.safe_load(gpu["configuration"])["stages"]["lm"]["kv_pages"] == 513


def test_buffers_grow_with_passes_and_kept_rows_up_to_their_limits() -> None:
    def of(device_kind: str = "cpu", **changes: int) -> int:
        given = {
            "max_batch": 4,
            "prefill_chunk_tokens": 8,
            "num_positions": 1000,
            "window": 3,
            "keep_bytes": 100,
        } | changes
        return buffer_bytes(
            PassLimits(**given), device_kind=device_kind, row_width=10, num_ids=7, itemsize=4
        )

    rows, logits, stored, sent = 20 * 32 * 40, 4 * 4 * 4 * 7, 1000 * 40, 100 + 3 * 32 * 40
    assert of() == PROCESS_BYTES["cpu"] + rows + logits + stored + sent
    assert of(keep_bytes=10**9) == PROCESS_BYTES["cpu"] + rows + logits + 2 * stored
    assert (
        of(prefill_chunk_tokens=10**6) == PROCESS_BYTES["cpu"] + 20 * stored + logits + 2 * stored
    )
    assert of("cuda") == PROCESS_BYTES["cuda"] + rows + logits + stored


def test_plan_that_does_not_fit_names_the_missing_bytes_and_remedies_that_work(
    tmp_path: Path,
) -> None:
    folder, memory = write_large(tmp_path), ["7GiB", "6GiB"]
    made = planned(folder, memory=memory)
    done = invoke(folder, memory=memory)
    assert done.exit_code == 1 and not made["fits"] and made["configuration"] == ""
    lacking = [each["lacking_bytes"] for each in made["spans"]]
    assert made["lacking_bytes"] == sum(lacking) > 0
    for number in (sum(lacking), *filter(None, lacking)):
        assert f"({number} bytes)" in done.output
    further = option_of_byte_size(made["further_worker_bytes"])
    assert f"add --memory {further}" in done.output
    assert planned(folder, memory=[*memory, further])["fits"]
    assert not planned(folder, memory=[*memory, f"{parse_byte_size(further, 'x') - 2 * MIB}B"])[
        "fits"
    ]


def test_fewer_pages_and_smaller_weights_are_remedies_where_they_are_enough(tmp_path: Path) -> None:
    folder = write_large(tmp_path)
    bfloat16 = planned(folder, "--dtype", "bfloat16", memory=["8GiB", "8GiB"])
    assert (
        bfloat16["fits"] and "set dtype: bfloat16" in invoke(folder, memory=["8GiB", "8GiB"]).output
    )
    pages = ("--dtype", "bfloat16", "--positions", "300000")
    made = planned(folder, *pages, memory=["8GiB", "8GiB"])
    remedy = next(each for each in made["remedies"] if "kv_pages" in each)
    most = int(remedy.partition("at most ")[2].split()[0])
    assert planned(folder, *pages[:2], "--positions", str(16 * most), memory=["8GiB", "8GiB"])[
        "fits"
    ]
    assert not planned(
        folder, *pages[:2], "--positions", str(16 * most + 16), memory=["8GiB", "8GiB"]
    )["fits"]


def test_plan_without_a_remedy_names_the_budgets_that_are_too_small(tiny: Path) -> None:
    output = invoke(tiny, memory=["10MiB"]).output
    assert "No single change makes it fit: give anchor at least" in output


def test_one_process_is_planned_without_spans(tiny: Path) -> None:
    done = invoke(tiny, memory=["2GiB"])
    assert (
        done.exit_code == 0
        and "One process holds the model" in done.output
        and "spans:" not in done.output
    )
    assert planned(tiny, memory=["2GiB"])["configuration"] == ""
    assert invoke(tiny, memory=["64MiB"]).exit_code == 1


def test_more_processes_than_layers_are_refused(tiny: Path) -> None:
    error = refusal(tiny, memory=["1GiB"] * 4)
    assert error.message == (
        "--memory: 4 processes for a model of 3 layers, and each needs a layer; give --memory "
        "at most 3 times"
    )


@pytest.mark.parametrize(
    "value", ["4", "0GiB", "GiB", "-1GiB", "1.5.2GiB", "4 apples", "", "1e3MiB"]
)
def test_memory_that_is_no_amount_is_refused_by_the_name_of_the_option(
    value: str, tiny: Path
) -> None:
    error = refusal(tiny, memory=["1GiB", value])
    assert error.message.startswith(
        f"--memory: {value!r} is no amount of memory; write a number with a unit, such as 900MiB"
    )


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("900MiB", 900 * MIB),
        ("2GB", 2 * 10**9),
        ("1.5GiB", 1536 * MIB),
        ("4gib", 4 << 30),
        ("16 KB", 16_000),
        ("7B", 7),
    ],
)
def test_memory_is_read_in_decimal_and_binary_units(text: str, num_bytes: int) -> None:
    assert parse_byte_size(text, "memory") == num_bytes


def test_stage_that_cannot_be_divided_is_refused_with_those_that_can() -> None:
    import torch

    with pytest.raises(
        ConfigError,
        match="those of lm of graph text, lm of graph cascade, thinker of graph qwen3_omni, "
        "talker of graph qwen3_omni can be",
    ):
        span_sizes(
            "text", StageName("other"), Path(), torch.float32, num_positions=1, buffer_bytes=0
        )


def test_other_engine_is_refused_with_the_option_that_helps(tiny: Path) -> None:
    assert (
        "add --set stages.lm.engine=torch"
        in refusal(tiny, "--set", "stages.lm.engine=vllm", memory=["1GiB"]).message
    )


def test_planning_reads_no_weight_and_needs_no_memory_for_them(tiny: Path, tmp_path: Path) -> None:
    """Planning reads no weight and needs no memory for weights. The sparse file has 20 GB; reading
    it would take memory and time.
    """
    folder = write_large(tmp_path, "F32")
    assert (folder / SINGLE).stat().st_size > 18e9 and (
        folder / SINGLE
    ).stat().st_blocks * 512 < MIB
    planned(tiny, memory=["1GiB", "1GiB"])  # all imports
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    made = planned(folder, memory=["16GiB", "16GiB"])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 100 * 1024
    assert made["fits"] and made["weight_files"]["num_bytes"] == sum(
        each["weight_bytes"] for each in made["spans"]
    )


def test_weight_files_may_be_of_another_precision_or_absent(tmp_path: Path) -> None:
    folder, memory = write_large(tmp_path), ["16GiB", "16GiB"]
    stored = planned(folder, memory=memory)
    assert stored["dtype"] == "float32" and stored["weight_files"]["dtypes"] == ["BF16"]
    assert 2 * stored["weight_files"]["num_bytes"] == sum(
        each["weight_bytes"] for each in stored["spans"]
    )
    (folder / SINGLE).unlink()
    absent = planned(folder, memory=memory)
    assert absent["weight_files"] is None and absent["spans"] == stored["spans"]
    (folder / INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": "model-1.safetensors"}})
    )
    assert planned(folder, memory=memory)["weight_files"]["missing_files"] == [
        "model-1.safetensors"
    ]
    assert (
        "weight files: 1 of 1 are not here; sizes are by config.json alone"
        in invoke(folder, memory=memory).output
    )


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        (
            {"lacks": "layers.23."},
            "the weight files have no layer 23, and config.json describes 24 layers",
        ),
        (
            {"lacks": "layers.5.mlp.up_proj"},
            r"model\.layers\.5 has \d+ numbers in the weight files, and \d+ by config\.json",
        ),
        (
            {"lacks": "lm_head"},
            r"\d+ numbers beside the layers, and embedding and output head have \d+",
        ),
        ({"intermediate_size": 12288}, r"model\.layers\.0 has \d+ numbers in the weight files"),
    ],
)
def test_weight_files_that_contradict_the_configuration_are_refused(
    changes: dict[str, Any], difference: str, tmp_path: Path
) -> None:
    error = refusal(write_large(tmp_path, **changes), memory=["16GiB", "16GiB"])
    assert error.param == "checkpoint"
    with pytest.raises(ConfigError, match=difference):
        raise error


def test_damaged_weight_file_is_refused_by_its_name(tmp_path: Path) -> None:
    folder = write_large(tmp_path)
    with (folder / SINGLE).open("r+b") as file:
        file.truncate(1000)
    assert f"{SINGLE} cannot be read" in refusal(folder, memory=["16GiB"]).message


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-Omni's config.json of the published size, without weights, as downloaded by name from
    the model hub.
    """
    folder = tmp_path_factory.mktemp("published")
    (folder / "config.json").write_text(json.dumps(published_config()))
    return folder


def omni_plan(stage: str, *options: str, memory: Sequence[str], config: str = "qwen3_omni") -> Any:
    budgets = [argument for each in memory for argument in ("--memory", each)]
    file = str(REPO / "configs" / f"{config}.yaml")
    return CliRunner().invoke(
        app, ["spans", "plan", "--config", file, "--stage", stage, *budgets, *options]
    )


@pytest.mark.parametrize("anchor", ["first", "last"])
@pytest.mark.parametrize(("stage", "num_layers"), [("thinker", 48), ("talker", 20)])
def test_stages_of_qwen3_omni_are_planned_and_accepted_as_configuration(
    stage: str, num_layers: int, anchor: str, published: Path, tmp_path: Path
) -> None:
    """Stages of Qwen3-Omni are planned, and the plan is accepted as configuration. No span worker
    of the Talker has the output head.
    """
    options = ("--checkpoint", str(published), "--anchor", anchor, "--set", "device=cuda")
    done = omni_plan(stage, *options, memory=["24GiB"] * 3)
    assert done.exit_code == 0, done.output
    file = tmp_path / "fleet.yaml"
    file.write_text("device: cuda\n" + done.output.partition("Add to the deployment file:\n")[2])
    config = open_deployment(file, None).config
    spans = config.stage(StageName(stage)).spans
    assert (
        spans is not None
        and len(spans.workers) == 2
        and next(problems_of_spans(StageName(stage), spans, num_layers), None) is None
    )
    heads = [LayerSpan.parse(each, "workers").has_output for each in spans.workers]
    assert any(heads) == (stage == "thinker" and anchor == "first")
    made = json.loads(omni_plan(stage, *options, "--json", memory=["24GiB"] * 3).stdout)
    assert made["weight_files"] is None and made["num_positions"] >= config.limits.max_prompt_tokens
    held = sum(each["weight_bytes"] for each in made["spans"])
    assert (59e9 < held < 64e9) if stage == "thinker" else (6e9 < held < 8e9), held


@pytest.mark.parametrize("case", [("thinker", 0.537, "40GiB"), ("talker", 0.587, "7GiB")])
def test_experts_in_8_bits_take_half(case: tuple[str, float, str], published: Path) -> None:
    stage, share, memory = case
    plain = ("--checkpoint", str(published), "--set", "device=cuda")
    options = (*plain, "--set", f"stages.{stage}.dtype=fp8")
    whole, rounded = (
        json.loads(omni_plan(stage, *each, "--json", memory=["64GiB"]).stdout)["spans"][0]
        for each in (plain, options)
    )
    assert rounded["weight_bytes"] / whole["weight_bytes"] == pytest.approx(share, abs=0.005)
    remedy = f"experts in 8 bits: set stages.{stage}.dtype: fp8"
    assert remedy in omni_plan(stage, *plain, memory=[memory]).output
    error = omni_plan(stage, *options, "--dtype", "float16", memory=[memory]).exception
    assert isinstance(error, ConfigError) and f"--set stages.{stage}.dtype=" in error.message


def test_stage_of_qwen3_omni_without_layers_is_refused(published: Path) -> None:
    error = omni_plan("code2wav", "--checkpoint", str(published), memory=["24GiB"]).exception
    assert isinstance(error, ConfigError) and error.message.startswith(
        "stage: the layers of code2wav of graph qwen3_omni cannot"
    )
