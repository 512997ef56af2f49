"""Import layers of the source: which package may import which, and which may know the model."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from fleet.graphs import GRAPHS
from tests.sources import EVERYTHING, OURS, SOURCES, imports, module_of, nodes, relative, within
from tests.support import REPO, cli_env

CLIENT = "fleet.control.client"
NOUNS = (
    "fleet.core",
    "fleet.graphs",
    "fleet.spans.protocol",
    "fleet.drafts.figures",
    "fleet.telemetry",
)
"""Packages of plain data that every process may import: no connection, no torch, no time-dependent
behaviour.
"""
BASE = (*NOUNS, "fleet.process", "fleet.config")
TORCH = ("fleet.engine", "fleet.engine.torch")
BELOW_WEB = (
    *BASE,
    CLIENT,
    "fleet.processing",
    "fleet.constraints",
    "fleet.drafts.capture",
    "fleet.batches",
    "fleet.history",
)
OFFLOAD = ("web.http.offload", "web.http.refused_work", "web.http.priority", "web.http.callers")
BELOW_ENDPOINTS = (
    *BELOW_WEB,
    "web.http",
    "web.schema",
    "web.gateway",
    "web.openai",
)

LAYERS: dict[str, tuple[str, ...]] = {
    "fleet.core": (),
    "fleet.process": ("fleet.core",),
    "fleet.graphs": ("fleet.core",),
    "fleet.spans.protocol": ("fleet.core",),
    "fleet.drafts.figures": ("fleet.core",),
    "fleet.telemetry": ("fleet.core", "fleet.spans.protocol", "fleet.drafts.figures"),
    "fleet.constraints": ("fleet.core",),
    "fleet.history": ("fleet.core", "fleet.process", "fleet.telemetry"),
    # The stage and edge names in a deployment file are checked against the declaration.
    "fleet.config": NOUNS,
    # The scripts enforce the conductor's table of states.
    "fleet.conductor.states": (),
    "fleet.control": (*BASE, "fleet.conductor.states"),
    CLIENT: (*BASE, "fleet.control"),
    "fleet.conductor": (*BASE, "fleet.conductor.states", "fleet.control"),
    "fleet.transfer": ("fleet.core", "fleet.config"),
    "fleet.spans.net": (*BASE, "fleet.transfer"),
    "fleet.engine": NOUNS,
    "fleet.engine.torch": (*NOUNS, "fleet.engine"),
    # Tokens are sampled by the same functions on both engines.
    "fleet.engine.vllm": (*NOUNS, *TORCH),
    "fleet.drafts": (*NOUNS, *TORCH),
    "fleet.spans.torch": (*NOUNS, *TORCH),
    "fleet.spans.anchor": (*NOUNS, *TORCH, "fleet.spans.torch"),
    "fleet.processing": ("fleet.core", "fleet.graphs", "fleet.config", "fleet.constraints"),
    # A program of the torch loop is written with the loop's own pieces; a tiny checkpoint is
    # written with the tokenizer that reads it.
    "fleet.models": (*NOUNS, *TORCH, "fleet.engine.vllm", "fleet.spans.torch", "fleet.processing"),
    "fleet.stages": (
        *NOUNS, "fleet.config", *TORCH, "fleet.engine.vllm", "fleet.drafts", "fleet.spans.torch",
        "fleet.spans.anchor", "fleet.models", "fleet.processing", "fleet.constraints",
    ),
    "fleet.worker.process": (*BASE, "fleet.control", "fleet.transfer", "fleet.spans.net"),
    "fleet.spans.route": (
        *BASE, *TORCH, "fleet.control", "fleet.transfer", "fleet.spans.net", "fleet.stages",
        "fleet.worker.process",
    ),
    "fleet.spans.host": (
        *BASE, *TORCH, "fleet.control", "fleet.transfer", "fleet.spans.net", "fleet.spans.torch",
        "fleet.stages", "fleet.worker.process", "fleet.spans.route",
    ),
    "fleet.drafts.exchange": (
        *BASE, "fleet.control", "fleet.transfer", "fleet.drafts", "fleet.stages",
        "fleet.worker.process",
    ),
    "fleet.drafts.capture": (*BASE, "fleet.control", CLIENT, "fleet.processing"),
    "fleet.worker": (
        *BASE, "fleet.control", "fleet.transfer", "fleet.spans.net", "fleet.engine", "fleet.stages",
        "fleet.worker.process", "fleet.spans.route", "fleet.spans.host", "fleet.drafts.exchange",
    ),
    "fleet.batches": BASE,
    "fleet.batches.asking": (*BASE, "fleet.batches"),
    "fleet.jobs": (*BASE, "fleet.control", CLIENT, "fleet.batches", "fleet.batches.asking"),
    # The rooms of the gateway, from the bottom up; the app, the server and the OpenAPI document
    # join them.
    "web.http.callers": ("fleet.config",),
    "web.http.refused_work": ("fleet.core",),
    "web.http.priority": (),
    "web.http.offload": ("fleet.core", "web.http.refused_work"),
    "web.http": (*BELOW_WEB, *OFFLOAD),
    "web.schema": (*BELOW_WEB, "web.http"),
    "web.gateway": (*BELOW_WEB, *OFFLOAD, "web.schema"),
    "web.openai": (*BELOW_WEB, "web.http", "web.schema", "web.gateway"),
    "web.realtime": BELOW_ENDPOINTS,
    "web.speech_stream": (*BELOW_ENDPOINTS, "web.realtime"),
    "web.fleet_api": BELOW_ENDPOINTS,
    "web.console": (*BELOW_ENDPOINTS, "web.fleet_api", "web.realtime"),
    "web": (
        *BELOW_ENDPOINTS, "web.fleet_api", "web.realtime", "web.speech_stream", "web.console",
    ),
    # The download is a command's; no process of a fleet does it.
    "fleet.hub": ("fleet.core",),
    # The laboratory looks at every part; nothing but the commands imports it.
    "fleet.lab": ("fleet",),
    "fleet.cli": OURS,
    "fleet": (),
}  # fmt: skip
"""Layers that each layer may import besides itself. A module belongs to the layer with the longest
matching prefix. A row names only earlier rows.
"""
NO_TORCH = (
    *BASE,
    "fleet.control",
    "fleet.conductor",
    "fleet.processing",
    "fleet.spans.net",
    "web",
)
NOT_SERVING = ("fleet.lab",)
KNOWS_THE_MODEL = (
    "fleet/graphs/",
    "fleet/stages/",
    "fleet/models/",
    "fleet/processing/",
    "fleet/lab/pocket/",
    "tests/",
)
MODEL_WORDS = re.compile(
    r"talker|code2wav|qwen|cascade|hibari|kokoro(?!-fastapi)"
    r"|smollm(?!2-135m-instruct)|whisper(?!-1\")",
    re.IGNORECASE,
)
"""Names of models and stages. `whisper-1` is a name in OpenAI's API, Kokoro-FastAPI a server, and
SmolLM2-135M-Instruct an example of a hub name.
"""
STAGE_NAMES = {stage.name for graph in GRAPHS.values() for stage in graph.stages}
OWN_LIBRARY = {
    # Beside its home: where a process is tied together, its client is handed on and its errors are
    # caught.
    "redis": (
        "fleet.control",
        "fleet.conductor",
        "fleet.drafts.exchange",
        "fleet.spans.host",
        "fleet.spans.route",
        "fleet.worker",
        "fleet.jobs",
        "fleet.cli",
        "fleet.lab.faults.patience",
        "fleet.lab.faults.redis_servers",
    ),
    "nixl": ("fleet.transfer",),
    "aiortc": ("web.realtime.webrtc", "fleet.lab.measure.voice_call"),
    "vllm": (
        "fleet.engine.vllm",
        "fleet.models.qwen3_omni.vllm_plugin",
        "fleet.models.qwen3_omni.vllm_thinker",
        "fleet.lab.measure.vllm_generate",
    ),
}


def layer_of(module: str) -> str:
    return max((layer for layer in LAYERS if within(module, layer)), key=len)


def test_layer_imports_only_layers_in_its_row() -> None:
    wrong = [
        f"{relative(path)}:{line} imports {target}"
        for path in SOURCES
        for line, target in imports(path)
        if target.split(".")[0] in OURS and not allowed(layer_of(module_of(path)), target)
    ]
    assert not wrong, "\n".join(wrong)


def test_rows_name_earlier_rows_only() -> None:
    rows = list(LAYERS)
    later = [
        (layer, below)
        for number, layer in enumerate(rows)
        for below in LAYERS[layer]
        if below in rows[number:] and layer not in ("fleet.lab", "fleet.cli")
    ]
    assert later == []


def test_no_files_import_each_other_in_a_circle() -> None:
    modules = {module_of(path) for path in SOURCES}
    graph = {
        module_of(path): {module_within(target, modules) for _, target in imports(path)}
        for path in SOURCES
    }
    circular = {module for module in graph if module in reachable(graph, module)}
    assert not circular


def reachable(graph: dict[str, set[str | None]], module: str) -> set[str | None]:
    """Return the modules that `module` imports, directly or through others."""
    found: set[str | None] = set()
    left = [*graph[module] - {module}]
    while left:
        target = left.pop()
        if target is not None and target not in found:
            found.add(target)
            left.extend(graph[target])
    return found


def module_within(target: str, modules: set[str]) -> str | None:
    """Return the module that an import names: for `from a import b`, `a.b` if that is a module,
    else `a`.
    """
    if target in modules:
        return target
    parent = target.rpartition(".")[0]
    return parent if parent in modules else None


def allowed(layer: str, target: str) -> bool:
    """Return True if `layer` may import `target`. A narrower layer within a package is a layer of
    its own: `fleet.control` may import the conductor's states, and not its leases.
    """
    if any(within(target, prefix) for prefix in LAYERS[layer]):
        return True
    return layer != "fleet" and within(target, layer) and layer_of(target) == layer


def test_packages_have_a_row_in_the_table_and_rows_a_package() -> None:
    packages = {f"fleet.{path.parent.name}" for path in (REPO / "fleet").glob("*/*.py")}
    assert {package for package in packages if layer_of(package) == "fleet"} <= {"fleet.spans"}
    assert [
        layer for layer in LAYERS if not any(within(module_of(path), layer) for path in SOURCES)
    ] == []


def test_packages_without_torch_never_load_it() -> None:
    """Packages without torch never load it; each module is imported alone in a fresh interpreter,
    so that an indirect import counts too.
    """
    modules = [
        module_of(path)
        for package in NO_TORCH
        for path in SOURCES
        if within(module_of(path), package)
    ]
    assert {
        package for package in NO_TORCH if any(within(module, package) for module in modules)
    } == set(NO_TORCH)
    run_python(
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(name + ' loads torch')\n"
    )


def run_python(program: str) -> str:
    """Run a program in a fresh interpreter, and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=cli_env(),
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


IMPORTS_OF_SERVING = f"""
import importlib, sys
from typer.testing import CliRunner
from fleet.cli.checkpoint import resolve_checkpoint
from fleet.cli.main import app
from fleet.config import FleetConfig
from fleet.graphs import GRAPHS

assert CliRunner().invoke(app, ["--help"]).exit_code == 0
resolve_checkpoint(FleetConfig())
served = ["fleet.conductor.driver", "fleet.worker.main", "fleet.cli.manager", "web.serve"]
for graph in GRAPHS.values():
    entries = [graph.frontend, *(stage.builder for stage in graph.stages)]
    served += [entry.partition(":")[0] for entry in entries]
for name in served:
    importlib.import_module(name)
print(*sorted(name for name in sys.modules if name.startswith({NOT_SERVING!r})))
"""


def test_help_and_serving_processes_import_no_package_that_measures_or_trains() -> None:
    assert run_python(IMPORTS_OF_SERVING).split() == []


def test_library_of_one_layer_stays_in_it() -> None:
    wrong = [
        f"{relative(path)}:{line} imports {target}"
        for path in SOURCES
        for line, target in imports(path)
        for library in OWN_LIBRARY
        if target.split(".")[0].startswith(library) and target.split(".")[0] not in OURS
        if not any(within(module_of(path), layer) for layer in OWN_LIBRARY[library])
    ]
    assert not wrong, "\n".join(wrong)


def test_model_names_stay_in_the_declared_packages() -> None:
    wrong = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in EVERYTHING
        if not relative(path).startswith(KNOWS_THE_MODEL)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if MODEL_WORDS.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_names_of_stages_are_read_from_the_graph() -> None:
    """No string in the serving code is the name of a stage, or of a weight below one."""
    wrong = [
        f"{relative(path)}:{node.lineno}: {node.value!r}"
        for path in SOURCES
        if not relative(path).startswith(KNOWS_THE_MODEL)
        for node in nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if node.value.partition(".")[0] in STAGE_NAMES and " " not in node.value
    ]
    assert not wrong, "\n".join(wrong)


def test_imported_libraries_are_declared() -> None:
    """Imported libraries are declared dependencies, by distribution name. Libraries that only
    tests, the training of Pocket, vLLM's engine, calls or the export of traces import may be in
    their extras.

    torch for CUDA brings triton.
    """
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    declared = {distribution(text) for text in project["dependencies"]}
    of_extra = {
        name: {distribution(text) for text in texts}
        for name, texts in project["optional-dependencies"].items()
    }
    extra_of = {
        "fleet/lab/pocket/": of_extra["pocket"],
        "fleet/models/voices/": of_extra["voice"],
        "fleet/engine/vllm/": of_extra["vllm"],
        "fleet/models/qwen3_omni/vllm_": of_extra["vllm"],
        "fleet/lab/measure/vllm_generate.py": of_extra["vllm"],
        "fleet/lab/measure/voice_call.py": of_extra["webrtc"],
        "fleet/engine/torch/fp8_triton.py": {"triton"},
        "fleet/engine/torch/kernels/": {"triton"},
        "fleet/engine/torch/snake_kernel.py": {"triton"},
        "web/fleet_api/otlp/": of_extra["otlp"],
        "web/realtime/webrtc/": of_extra["webrtc"],
        "tests/": set().union(
            *(of_extra[name] for name in ("otlp", "pocket", "voice", "webrtc", "test"))
        ),
        "tests/vllm/": of_extra["vllm"],
    }

    def allowed(path: Path) -> set[str]:
        return declared.union(
            *(extra for folder, extra in extra_of.items() if relative(path).startswith(folder))
        )

    wrong = [
        f"{relative(path)}:{line} imports {target}"
        for path in EVERYTHING
        for line, target in imports(path)
        if (library := library_of(target)) and library not in allowed(path)
    ]
    assert not wrong, "\n".join(wrong)


def distribution(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9_.-]", requirement)[0].lower().replace("-", "_")


def library_of(target: str) -> str | None:
    """Return the distribution behind an import; None for the standard library and our own
    packages.
    """
    top = target.split(".")[0]
    if top in sys.stdlib_module_names or top in {*OURS, "tests"}:
        return None
    distributions = {
        "yaml": "pyyaml",
        "multipart": "python_multipart",
        "pyworld": "pyworld_prebuilt",
        "hibari": "hibari_tts",
        "opentelemetry": "opentelemetry_sdk",
    }
    return distributions.get(top, top.lower())


def test_checks_find_violations() -> None:
    assert not allowed("fleet.control", "fleet.conductor.leases.LeaseWatch")
    assert allowed("fleet.control", "fleet.conductor.states.TASK_MOVES")
    assert not allowed("web", "fleet.control.connect")
    assert allowed("web", "fleet.control.client.FleetClient")
    assert not allowed("fleet.engine.torch", "fleet.models.causal_lm")
