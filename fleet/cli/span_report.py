"""Output of `fleet spans plan`: a table, the lines of the deployment file and the missing bytes
with remedies; or one JSON object.
"""

import json
from collections.abc import Iterator

from rich.console import Console

from fleet.cli.span_planning import MadePlan
from fleet.core.byte_sizes import format_byte_size
from fleet.lab.report.tables import bar_of, table_of
from fleet.spans.protocol.plan import PlannedSpan

WIDTH = 110
"""Width of the table in columns if the output is not a terminal."""


def print_plan(made: MadePlan) -> None:
    for line in (*_model_lines(made), *_file_lines(made)):
        print(line)
    table = table_of("process", "layers", "weights", "KV", "buffers", "sum", "budget", "fill", "")
    for name, each in _named_spans(made):
        kv, buffers = made.sizes.cached_bytes(each.span), made.sizes.buffer_bytes
        amounts = (each.num_bytes - kv - buffers, kv, buffers, each.num_bytes, each.budget)
        bar = bar_of(each.fill)
        shown = f"[red]{bar}[/]" if each.lacking_bytes else bar
        table.add_row(
            name, str(each.span), *map(format_byte_size, amounts), f"{100 * each.fill:.0f} %", shown
        )
    console = Console()
    Console(width=None if console.is_terminal else WIDTH).print(table)
    for line in _missing_lines(made) if made.plan.lacking_bytes else _result_lines(made):
        print(line)


def plan_as_json(made: MadePlan) -> str:
    request, headers = made.request, made.headers
    spans = [
        {
            "process": name,
            "span": str(each.span),
            "has_head": each.has_head,
            "weight_bytes": each.num_bytes
            - made.sizes.cached_bytes(each.span)
            - made.sizes.buffer_bytes,
            "kv_bytes": made.sizes.cached_bytes(each.span),
            "buffer_bytes": made.sizes.buffer_bytes,
            "num_bytes": each.num_bytes,
            "budget_bytes": each.budget,
            "lacking_bytes": each.lacking_bytes,
        }
        for name, each in _named_spans(made)
    ]
    stored = None
    if headers is not None:
        stored = {
            "files": headers.num_files,
            "missing_files": list(headers.missing),
            "num_bytes": headers.num_bytes,
            "dtypes": list(headers.dtypes),
        }
    return json.dumps(
        {
            "graph": request.graph,
            "stage": request.stage.name,
            "checkpoint": str(request.options.checkpoint),
            "device": request.device_kind,
            "dtype": request.options.dtype,
            "num_layers": len(made.sizes.layers),
            "num_positions": request.num_positions,
            "kv_pages": request.num_pages,
            "weight_files": stored,
            "fits": not made.plan.lacking_bytes,
            "lacking_bytes": made.plan.lacking_bytes,
            "further_worker_bytes": made.further_worker_bytes,
            "remedies": list(made.remedies),
            "spans": spans,
            "configuration": ""
            if made.plan.lacking_bytes or len(spans) == 1
            else "\n".join(_configuration(made)),
        }
    )


def _named_spans(made: MadePlan) -> Iterator[tuple[str, PlannedSpan]]:
    """Yield each process name of the plan and its span, in layer order; workers are numbered from
    1.
    """
    number = 0
    for each in made.plan.spans:
        number += not each.is_anchor
        yield "anchor" if each.is_anchor else f"worker {number}", each


def _model_lines(made: MadePlan) -> Iterator[str]:
    request, options = made.request, made.request.options
    model = f"{len(made.sizes.layers)} layers in {options.dtype} on {request.device_kind}"
    yield f"{options.checkpoint}: stage {options.stage}, {model}"
    counted = (
        ", which the longest request within the limits needs"
        if request.num_pages == request.min_pages
        else ""
    )
    pages = f"{request.num_pages} pages of {options.own.page_size_tokens}{counted}"
    yield f"keys and values of {request.num_positions} positions ({pages}); buffers: an upper bound"


def _file_lines(made: MadePlan) -> Iterator[str]:
    headers = made.headers
    if headers is None:
        yield "weight files: none here; sizes are by config.json alone"
    elif headers.missing:
        yield (
            f"weight files: {len(headers.missing)} of {headers.num_files} are not here; sizes "
            "are by config.json alone"
        )
    else:
        stored = f"{format_byte_size(headers.num_bytes)} in {'/'.join(headers.dtypes)}"
        yield (
            f"weight files: {headers.num_files} with {stored}; their headers agree with config.json"
        )


def _result_lines(made: MadePlan) -> Iterator[str]:
    if len(made.plan.spans) == 1:
        yield "One process holds the model: its layers need not be divided."
        return
    path = (
        "through the workers to the anchor"
        if made.request.anchor_is_last
        else "from the anchor through the workers"
    )
    yield f"The model fits. Passes go {path}. Add to the deployment file:"
    yield ""
    yield from _configuration(made)


def _configuration(made: MadePlan) -> Iterator[str]:
    """Yield YAML lines that divide the layers, and the settings that the plan assumes but the
    deployment file lacks.
    """
    request = made.request
    for key, value in request.changed.items():
        yield f"{key}: {json.dumps(value)}"
    yield "stages:"
    yield f"  {request.stage.name}:"
    if request.num_pages != (request.kv_pages or request.options.kv_pages):
        yield f"    kv_pages: {request.num_pages}"
    yield "    spans:"
    yield f"      anchor: {next(each.span for each in made.plan.spans if each.is_anchor)}"
    workers = ", ".join(f'"{each.span}"' for each in made.plan.spans if not each.is_anchor)
    yield f"      workers: [{workers}]"


def _missing_lines(made: MadePlan) -> Iterator[str]:
    lacking = made.plan.lacking_bytes
    yield f"The model does not fit: {format_byte_size(lacking)} ({lacking} bytes) are missing."
    for name, each in _named_spans(made):
        if each.lacking_bytes:
            yield (
                f"  {name} ({each.span}): {format_byte_size(each.lacking_bytes)} "
                f"({each.lacking_bytes} bytes)"
            )
    if made.remedies:
        yield "Each of these alone makes it fit:"
        yield from (f"  * {remedy}" for remedy in made.remedies)
    else:
        yield f"No single change makes it fit: {_least_budgets(made)}."


def _least_budgets(made: MadePlan) -> str:
    """Return a remedy text: the memory that each process that lacks memory would need in this
    division.
    """
    wanted = [
        f"{name} at least {format_byte_size(each.num_bytes)}"
        for name, each in _named_spans(made)
        if each.lacking_bytes
    ]
    return f"give {', '.join(wanted)}, or more workers"
