"""`fleet spans`: plans the division of a model's layers by the memory of the processes. Loads no
weight.
"""

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fleet.cli.checkpoint import resolve_configuration
from fleet.cli.deployment import open_deployment
from fleet.cli.options import ConfigFile, Overrides
from fleet.config import FleetConfig
from fleet.config.stage_schema import KV_PAGES, SpansConfig
from fleet.core.byte_sizes import parse_byte_size
from fleet.core.errors import ConfigError
from fleet.core.ids import StageName

if TYPE_CHECKING:
    from fleet.cli.span_planning import PlanRequest

app = typer.Typer(name="spans", no_args_is_help=True)
MEMORY = "--memory"


@app.callback()
def spans() -> None:
    """Divide the layers of a model that no single process can hold."""


Memory = Annotated[
    list[str],
    typer.Option(
        MEMORY,
        metavar="SIZE",
        help="Memory of a process: 900MiB, 2GB, 1.5GiB. First the anchor's, then each span "
        "worker's in order of layers.",
    ),
]
AnchorPlace = Annotated[
    Literal["first", "last"],
    typer.Option(
        help="The layers of the anchor: the first ones, or the last ones with the output head."
    ),
]
DividedStage = Annotated[
    str | None,
    typer.Option(help="The stage. Default: the first one whose layers can be divided."),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="A folder with config.json; weight files may be missing. Default: the deployment's.",
    ),
]
Positions = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Positions of keys and values. Default: kv_pages x page_size_tokens of the stage.",
    ),
]
DType = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option(
        help="Default: the deployment's; auto is float32 on a CPU, bfloat16 on a GPU. For fp8 add "
        "--set stages.NAME.dtype=fp8."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def plan(
    memory: Memory,
    anchor: AnchorPlace = "first",
    stage: DividedStage = None,
    checkpoint: Checkpoint = None,
    positions: Positions = None,
    dtype: DType = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Divide a stage's layers among an anchor and span workers by their memory; print the bytes
    that each process needs, and the configuration.

    Counts weights, keys and values, and buffers, from the checkpoint's configuration and the
    headers of its weight files: no weight is read. Buffers are an upper bound: the process itself,
    the rows of its largest pass, and the rows that it keeps. For a GPU, SIZE is its memory: add
    --set device=cuda if this machine has none.

    The exit status is 1 if the model does not fit; the output then has the missing bytes and the
    remedies. With one SIZE, the output shows whether one process holds the model.

    Examples:

      fleet spans plan --config configs/text.yaml --memory 1GiB --memory 1GiB --memory 900MiB

      fleet spans plan --config configs/text.yaml --set device=cuda --anchor last --memory 24GB
      --memory 24GB
    """
    # Imported here, since every command imports this module when it starts.
    from fleet.cli.span_planning import make_plan
    from fleet.cli.span_report import plan_as_json, print_plan

    budgets = tuple(parse_byte_size(each, MEMORY) for each in memory)
    deployment = open_deployment(config, set_).config
    request = _request(
        deployment,
        stage,
        checkpoint,
        dtype,
        budgets,
        anchor_is_last=anchor == "last",
        positions=positions,
    )
    made = make_plan(request)
    if as_json:
        print(plan_as_json(made))
    else:
        print_plan(made)
    if made.plan.lacking_bytes:
        raise typer.Exit(1)


def _request(
    config: FleetConfig,
    stage: str | None,
    checkpoint: Path | None,
    dtype: str | None,
    budgets: tuple[int, ...],
    *,
    anchor_is_last: bool,
    positions: int | None,
) -> "PlanRequest":
    """Return the plan's inputs from the command's options and the deployment. Raises: ConfigError
    naming the option or field.
    """
    from fleet.cli.span_planning import PlanRequest
    from fleet.stages.builders import build_options

    name = _divisible_stage(config, stage)
    if config.engine_of(name) != "torch":
        field = f"stages.{name}.engine"
        raise ConfigError(
            f"{field}: the engine {config.engine_of(name)} cannot divide a model's layers; add "
            f"--set {field}=torch",
            param=field,
        )
    own_dtype = config.stage(name).dtype
    if dtype is not None and own_dtype not in (None, dtype):
        field = f"stages.{name}.dtype"
        raise ConfigError(
            f"--dtype: {field} is {own_dtype}, which has priority; use --set {field}={dtype}",
            param="dtype",
        )
    given = {"checkpoint": str(checkpoint.absolute()) if checkpoint else None, "dtype": dtype}
    changed = {
        key: value for key, value in given.items() if value not in (None, getattr(config, key))
    }
    config = config.model_copy(update=changed)
    # The notes of a first start belong to no JSON.
    with contextlib.redirect_stdout(sys.stderr):
        config = resolve_configuration(config, name)
    options = build_options(config, name, Path(config.checkpoint), is_here=False)
    page, stage_of_graph = options.own.page_size_tokens, config.graph_declaration().stage(name)
    # On a GPU the number is by default a share of it. Only the main stage's requests have a length
    # limit of their own.
    default_pages = options.kv_pages or (
        -(-options.min_positions // page) if stage_of_graph.main else KV_PAGES
    )
    spans = config.stage(name).spans or SpansConfig(anchor="0:output")
    return PlanRequest(
        graph=config.graph,
        stage=stage_of_graph,
        options=options,
        num_pages=-(-positions // page) if positions else default_pages,
        budgets=budgets,
        anchor_is_last=anchor_is_last,
        keep_bytes=spans.keep_mib << 20,
        window=spans.window or len(budgets) + 1,
        changed=changed,
        kv_pages=config.stage(name).kv_pages,
    )


def _divisible_stage(config: FleetConfig, stage: str | None) -> StageName:
    if stage is not None:
        return config.graph_declaration().stage(StageName(stage)).name
    able = [each.name for each in config.graph_declaration().stages if each.span_builder]
    if not able:
        raise ConfigError(
            f"graph {config.graph} has no stage whose layers can be divided; use another, such "
            "as --config configs/text.yaml",
            param="graph",
        )
    return able[0]
