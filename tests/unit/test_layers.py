"""The layers and the house style, checked over the source: who may import whom, who may know the
model, what is too big.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support import REPO, cli_env

OURS = ("fleet", "web")
CLIENT = "fleet.control.client"
BELOW_WEB = (
    "fleet.core",
    "fleet.config",
    "fleet.graphs",
    CLIENT,
    "fleet.processing",
    "fleet.drafts.capture",
)
OFFLOAD = ("web.offload", "web.refused_work")
BELOW_ENDPOINTS = (
    *BELOW_WEB,
    *OFFLOAD,
    "web.ports",
    "web.http",
    "web.schema",
    "web.gateway",
    "web.openai",
)

MEASURING = ("fleet.lab.client", "fleet.lab.report")

LAYERS: dict[str, tuple[str, ...]] = {
    "fleet.core": (),
    # The stage and edge names in a deployment file are checked against the declaration.
    "fleet.config": ("fleet.core", "fleet.graphs"),
    "fleet.graphs": ("fleet.core",),
    "fleet.conductor": ("fleet.core", "fleet.config", "fleet.graphs"),
    "fleet.conductor.driver": (
        "fleet.core",
        "fleet.config",
        "fleet.graphs",
        "fleet.conductor",
        "fleet.control",
    ),
    # Views and the client read which edges and stages a request runs from the declaration.
    "fleet.control": ("fleet.core", "fleet.config", "fleet.graphs"),
    CLIENT: ("fleet.core", "fleet.config", "fleet.graphs", "fleet.control"),
    "fleet.transfer": ("fleet.core", "fleet.config"),
    "fleet.spans": ("fleet.core", "fleet.spans.protocol.chain", "fleet.transfer"),
    "fleet.engine": ("fleet.core", "fleet.engine.base"),
    "fleet.engine.torch": (
        "fleet.core",
        "fleet.config",
        "fleet.engine.base",
        "fleet.spans.protocol.chain",
        "fleet.spans.protocol.pass_log",
        "fleet.engine.torch",
    ),
    # Tokens are drawn by the same functions on both engines.
    "fleet.engine.vllm": (
        "fleet.core",
        "fleet.engine.base",
        "fleet.engine.vllm",
        "fleet.engine.torch.noise",
        "fleet.engine.torch.sampling",
    ),
    # A program of the torch loop is written with the loop's own pieces: its KV layout, tiles and
    # draws. A tiny checkpoint is written with the tokenizer that reads it.
    "fleet.models": (
        "fleet.core",
        "fleet.engine.base",
        "fleet.engine.torch",
        "fleet.engine.vllm",
        "fleet.processing.tokenizer",
    ),
    "fleet.drafts.trainer": (
        "fleet.core",
        "fleet.graphs.training",
        "fleet.engine.base",
        "fleet.drafts.eagle3",
        "fleet.drafts.trainer",
    ),
    "fleet.processing": ("fleet.core", "fleet.config"),
    "fleet.stages": (
        "fleet.core",
        "fleet.graphs",
        "fleet.engine",
        "fleet.models",
        "fleet.drafts.trainer",
        "fleet.processing",
    ),
    "fleet.worker": (
        "fleet.core",
        "fleet.config",
        "fleet.graphs",
        "fleet.conductor",
        "fleet.control",
        "fleet.transfer",
        "fleet.engine",
        "fleet.models",
        "fleet.processing",
        "fleet.spans",
        "fleet.stages",
        "fleet.drafts.trainer.records",
    ),
    "fleet.drafts.capture": (
        "fleet.core",
        "fleet.config",
        "fleet.graphs",
        "fleet.control",
        "fleet.processing",
    ),
    # The rooms of the gateway, from the bottom up; the app, the server and the OpenAPI document
    # join them.
    "web.ports": BELOW_WEB,
    "web.refused_work": ("fleet.core",),
    "web.offload": ("fleet.core", "web.refused_work"),
    "web.http": (*BELOW_WEB, *OFFLOAD, "web.ports"),
    "web.schema": (*BELOW_WEB, "web.http"),
    "web.gateway": (*BELOW_WEB, *OFFLOAD, "web.ports", "web.schema"),
    "web.openai": (*BELOW_WEB, *OFFLOAD, "web.http", "web.schema", "web.gateway"),
    "web.realtime": BELOW_ENDPOINTS,
    "web.fleet_api": BELOW_ENDPOINTS,
    "web.console": (*BELOW_ENDPOINTS, "web.fleet_api", "web.realtime"),
    "web": (*BELOW_WEB, "web"),
    "fleet.jobs": (
        "fleet.core",
        "fleet.config",
        "fleet.control.jobs",
        "fleet.control.job_files",
        "fleet.control.outage",
        CLIENT,
    ),
    "fleet.lab.client": ("fleet.core",),
    "fleet.lab.report": ("fleet.core",),
    # The benchmark looks from outside; what it compares with runs aside, and each measure of a part
    # is a module of its own.
    "fleet.lab.measure": (
        "fleet.core",
        "fleet.config",
        "fleet.graphs",
        "fleet.processing",
        CLIENT,
        *MEASURING,
        "fleet.lab.measure",
    ),
    # The engine benchmark refuses where vLLM is missing, and runs vLLM's own entry point in a
    # process of its own.
    "fleet.lab.measure.engines": (
        "fleet.core",
        "fleet.config",
        "fleet.engine.vllm.start",
        *MEASURING,
        "fleet.lab.measure",
    ),
    "fleet.lab.measure.engines_run": (
        "fleet.core",
        "fleet.config",
        "fleet.engine.base",
        "fleet.worker",
        "fleet.lab.measure",
    ),
    "fleet.lab.measure.vllm_generate": ("fleet.core", "fleet.stages.base"),
    "fleet.lab.measure.hop": (
        "fleet.core",
        "fleet.control",
        "fleet.worker.process.redis_link",
        *MEASURING,
        "fleet.lab.measure",
    ),
    "fleet.lab.measure.pair": ("fleet.core", "fleet.control", "fleet.worker.process.redis_link"),
    "fleet.lab.measure.transfer": ("fleet.transfer", *MEASURING, "fleet.lab.measure"),
    # The measure of a device runs the stages themselves, without a fleet.
    "fleet.lab.measure.gpu": (
        "fleet.core",
        "fleet.graphs",
        "fleet.stages.full_size",
        "fleet.lab.report",
        "fleet.lab.measure",
    ),
    "fleet.lab.measure.gpu_measures": (
        "fleet.core",
        "fleet.graphs",
        "fleet.engine",
        "fleet.stages.base",
        "fleet.stages.full_size",
        "fleet.lab.report",
        "fleet.lab.measure",
    ),
    "fleet.lab.measure.kv_pages": (
        "fleet.core",
        "fleet.engine",
        "fleet.transfer",
        "fleet.lab.measure",
    ),
    # The measure of scale starts its own processes, joins as a gateway, and knows what the fake
    # engine must answer.
    "fleet.lab.measure.scale": ("fleet.core", "fleet.config", CLIENT, "fleet.lab.measure"),
    "fleet.lab.measure.scale_fleet": (
        "fleet.core",
        "fleet.config",
        "fleet.control",
        "fleet.lab.measure",
    ),
    "fleet.lab.measure.scale_load": (
        "fleet.core",
        "fleet.control",
        "fleet.lab.report",
        "fleet.lab.measure",
    ),
    "fleet.lab.measure.scale_replay": (
        "fleet.core",
        "fleet.control",
        "fleet.worker.process.redis_link",
        "fleet.lab.measure",
    ),
    "fleet.lab.measure.scale_costs": (
        "fleet.core",
        "fleet.config",
        "fleet.control",
        "fleet.conductor.driver",
        "fleet.lab.measure",
    ),
    "fleet.lab.measure.scale_expected": (
        "fleet.core",
        "fleet.config",
        "fleet.worker",
        "fleet.lab.measure",
    ),
    # Without a fleet, the measure of layer spans is the anchor and places the span workers.
    "fleet.lab.measure.spans": (
        "fleet.core",
        "fleet.config",
        "fleet.models.causal_lm",
        "fleet.lab.report",
        "fleet.lab.measure",
    ),
    "fleet.lab.measure.span_hops_run": (
        "fleet.core",
        "fleet.lab.report",
        "fleet.spans",
        "fleet.transfer",
        "fleet.lab.measure",
    ),
    "fleet.lab.measure.spans_memory": (
        "fleet.core",
        "fleet.models.causal_lm",
        "fleet.lab.report",
        "fleet.lab.measure",
    ),
    "fleet.lab.measure.spans_run": (
        "fleet.core",
        "fleet.config",
        "fleet.engine",
        "fleet.spans",
        "fleet.stages",
        "fleet.worker",
        "fleet.lab.measure",
    ),
    "fleet.lab.measure.spans_recording": (
        "fleet.core",
        "fleet.spans.protocol.chain",
        "fleet.lab.measure",
    ),
    "fleet.lab.measure.spans_compute": (
        "fleet.core",
        "fleet.engine",
        "fleet.stages.base",
        "fleet.lab.measure",
    ),
    # The measure of training orders exchanges of the head, as an operator does.
    "fleet.lab.measure.training": (
        "fleet.core",
        "fleet.config",
        "fleet.control.embedded",
        CLIENT,
        *MEASURING,
        "fleet.lab.measure",
    ),
    # The measure of speculation runs a stage itself, and asks the questions of Pocket's corpus.
    "fleet.lab.measure.speculation": (
        "fleet.core",
        "fleet.config",
        "fleet.graphs",
        "fleet.processing",
        "fleet.lab.pocket.corpus",
        *MEASURING,
        "fleet.lab.measure",
    ),
    "fleet.lab.measure.speculation_head": (
        "fleet.core",
        "fleet.config",
        "fleet.engine.base",
        "fleet.graphs",
        "fleet.drafts.eagle3",
        "fleet.stages.base",
        "fleet.drafts.trainer",
        "fleet.worker",
        "fleet.lab.measure",
    ),
    "fleet.lab.measure.engine_answers": ("fleet.core", "fleet.engine.base", "fleet.stages.base"),
    "fleet.lab.measure.speculation_run": (
        "fleet.core",
        "fleet.config",
        "fleet.engine",
        "fleet.stages.base",
        "fleet.worker",
        "fleet.lab.measure",
    ),
    "fleet.lab.measure.twin": (
        "fleet.core",
        "fleet.graphs",
        "fleet.engine.base",
        "fleet.stages.base",
    ),
    "fleet.lab.measure.twin_run": (
        "fleet.core",
        "fleet.config",
        "fleet.worker",
        "fleet.lab.measure",
    ),
    "fleet.lab.pocket": (
        "fleet.core",
        "fleet.config",
        "fleet.models",
        "fleet.processing",
        *MEASURING,
        "fleet.lab.measure",
    ),
    # Chaos puts the benchmark's load on a fleet; two of its modules read Redis: keys in use, and
    # log lines.
    "fleet.lab.faults": (
        "fleet.core",
        "fleet.config",
        *MEASURING,
        "fleet.lab.measure",
        "fleet.lab.faults",
    ),
    "fleet.lab.faults.watch": ("fleet.core", "fleet.config", "fleet.control", "fleet.lab.faults"),
    "fleet.lab.faults.event_log": ("fleet.core", "fleet.control", "fleet.lab.faults"),
    "fleet.lab.faults.patience": ("fleet.core", "fleet.control"),
    "fleet.lab.faults.redis_servers": ("fleet.core", "fleet.control", "fleet.lab.faults"),
    "fleet.lab.faults.soak_samples": ("fleet.control", "fleet.lab.faults"),
    # Conversations are saved by the client of `fleet session`.
    "fleet.lab.faults.session_files": (
        "fleet.core",
        "fleet.config",
        "fleet.control",
        "fleet.worker.process.peers",
        "fleet.worker.sessions.client",
        "fleet.lab.faults",
    ),
    # Captures are those of a training run; what the trainer has of them is read from its
    # checkpoint.
    "fleet.lab.faults.captures": (
        "fleet.core",
        "fleet.config",
        "fleet.drafts.capture",
        "fleet.control.client",
        "fleet.processing",
        "fleet.drafts.trainer",
        *MEASURING,
        "fleet.lab.measure.prompts",
        "fleet.lab.faults",
    ),
    "fleet.lab.faults.options": (
        "fleet.core",
        "fleet.config",
        "fleet.graphs",
        *MEASURING,
        "fleet.lab.faults",
    ),
    "fleet.cli": OURS,
    "fleet": (),
}
"""Layer -> the packages of Fleet that it may import besides itself; a module belongs to the longest
prefix that fits.
"""

NO_TORCH = (
    "fleet.core",
    "fleet.config",
    "fleet.graphs",
    "fleet.control",
    "fleet.conductor",
    "fleet.processing",
    "fleet.spans",
    "web",
)
NOT_SERVING = ("fleet.lab.measure", "fleet.lab.faults", "fleet.lab.pocket")
KNOWS_THE_MODEL = (
    "fleet/graphs/",
    "fleet/stages/",
    "fleet/models/",
    "fleet/processing/",
    "fleet/lab/pocket/",
    "tests/",
)
MODEL_WORDS = re.compile("talker|code2wav|qwen", re.IGNORECASE)
OWN_LIBRARY = {
    # Beside its home: where a process is tied together, its client is handed on and its errors are
    # caught.
    "redis": (
        "fleet.control",
        "fleet.conductor.driver",
        "fleet.worker",
        "fleet.jobs",
        "fleet.cli",
        "fleet.lab.faults.patience",
        "fleet.lab.faults.redis_servers",
    ),
    "nixl": ("fleet.transfer",),
    "vllm": (
        "fleet.engine.vllm",
        "fleet.models.qwen3_omni.vllm_plugin",
        "fleet.models.qwen3_omni.vllm_thinker",
        "fleet.lab.measure.vllm_generate",
    ),
}
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_NESTING, MAX_TEST_NESTING = 500, 60, 3, 4


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parsed(path)))


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (REPO / folder).rglob("*.py"))


SOURCES = python_files(*OURS)
EVERYTHING = python_files(*OURS, "tests")


@cache
def relative(path: Path) -> str:
    return path.relative_to(REPO).as_posix()


def module_of(path: Path) -> str:
    parts = path.relative_to(REPO).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def layer_of(module: str) -> str:
    return max((layer for layer in LAYERS if within(module, layer)), key=len)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, lazy ones and those for type checking included; `from a
    import b` counts as a.b.
    """
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: write imports in full"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def test_layer_imports_only_layers_in_its_row() -> None:
    wrong = [
        f"{relative(path)}:{line} imports {target}"
        for path in SOURCES
        for line, target in imports(path)
        if target.split(".")[0] in OURS and not allowed(layer_of(module_of(path)), target)
    ]
    assert not wrong, "\n".join(wrong)


def allowed(layer: str, target: str) -> bool:
    """Within a package a narrower layer is another layer: `fleet.conductor` may not import its
    driver.
    """
    if any(within(target, prefix) for prefix in LAYERS[layer]):
        return True
    return layer != "fleet" and within(target, layer) and layer_of(target) == layer


def test_packages_have_a_row_in_the_table_and_rows_a_package() -> None:
    packages = {f"fleet.{path.parent.name}" for path in (REPO / "fleet").glob("*/*.py")}
    assert packages <= set(LAYERS)
    assert [
        layer for layer in LAYERS if not any(within(module_of(path), layer) for path in SOURCES)
    ] == []


def test_packages_without_torch_never_load_it() -> None:
    """Import each module in turn in a fresh interpreter, so that an indirect import counts too."""
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
    served += [graph.frontend.partition(":")[0], *(stage.builder.partition(":")[0] for stage in graph.stages)]
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


def test_imported_libraries_are_declared() -> None:
    """Checked by distribution name; what only tests, the training of Pocket or vLLM's engine import
    may be in their extras.

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
        "fleet/engine/vllm/": of_extra["vllm"],
        "fleet/models/qwen3_omni/vllm_": of_extra["vllm"],
        "fleet/lab/measure/vllm_generate.py": of_extra["vllm"],
        "fleet/engine/torch/paged_attention.py": {"triton"},
        "tests/": of_extra["pocket"] | of_extra["test"],
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
    """The distribution behind an import; None for the standard library and our own."""
    top = target.split(".")[0]
    if top in sys.stdlib_module_names or top in {*OURS, "tests"}:
        return None
    return {"yaml": "pyyaml", "multipart": "python_multipart", "pyworld": "pyworld_prebuilt"}.get(
        top, top.lower()
    )


def test_files_and_functions_keep_the_size_limits() -> None:
    wrong = [f"{relative(path)}{excess}" for path in EVERYTHING for excess in excesses(path)]
    assert not wrong, "\n".join(wrong)


def excesses(path: Path) -> Iterator[str]:
    num_lines = len(path.read_text().splitlines())
    max_nesting = MAX_TEST_NESTING if relative(path).startswith("tests/") else MAX_NESTING
    if num_lines > MAX_FILE_LINES:
        yield f": {num_lines} lines, limit {MAX_FILE_LINES}"
    for function in ast.walk(parsed(path)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        assert function.end_lineno is not None
        length = function.end_lineno - function.lineno + 1
        if length > MAX_FUNCTION_LINES:
            yield (
                f":{function.lineno}: {function.name} has {length} lines, limit "
                f"{MAX_FUNCTION_LINES}"
            )
        if (depth := nesting(function.body)) > max_nesting:
            yield f":{function.lineno}: {function.name} nests {depth} deep, limit {max_nesting}"


def nesting(body: list[ast.stmt]) -> int:
    """Return the depth of nested blocks; `elif` is no deeper than its `if`, and a function inside
    counts for itself.
    """
    return max((depth_of(statement) for statement in body), default=0)


def depth_of(statement: ast.stmt) -> int:
    if isinstance(statement, ast.If):
        chain = statement.orelse
        is_elif = len(chain) == 1 and isinstance(chain[0], ast.If)
        return max(
            1 + nesting(statement.body), depth_of(chain[0]) if is_elif else 1 + nesting(chain)
        )
    if isinstance(statement, ast.For | ast.AsyncFor | ast.While):
        return 1 + max(nesting(statement.body), nesting(statement.orelse))
    if isinstance(statement, ast.With | ast.AsyncWith):
        return 1 + nesting(statement.body)
    if isinstance(statement, ast.Try | ast.TryStar):
        handlers = [inner for handler in statement.handlers for inner in handler.body]
        return 1 + nesting(statement.body + handlers + statement.orelse + statement.finalbody)
    if isinstance(statement, ast.Match):
        return 1 + max(nesting(case.body) for case in statement.cases)
    return 0


def test_files_keep_the_house_rules() -> None:
    wrong = [
        f"{relative(path)}:{violation}" for path in EVERYTHING for violation in violations(path)
    ]
    assert not wrong, "\n".join(wrong)


def violations(path: Path) -> Iterator[str]:
    yield from (
        f"{line}: imports {target}"
        for line, target in imports(path)
        if target.split(".")[0] in PICKLES
    )
    for node in nodes(path):
        if found := offence(node, path):
            yield f"{getattr(node, 'lineno', 0)}: {found}"
    if path != Path(__file__):
        lines = enumerate(path.read_text().splitlines(), 1)
        yield from (
            f"{number}: {found[0]}" for number, line in lines if (found := UNFINISHED.search(line))
        )


PICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")


def offence(node: ast.AST, path: Path) -> str | None:
    in_tests = relative(path).startswith("tests/")
    if isinstance(node, ast.ExceptHandler) and swallows_everything(node):
        return "swallows every error"
    if in_tests and isinstance(node, ast.Call) and is_sleep(node):
        return "a sleep in a test; poll with wait_until"
    if (
        in_tests
        and isinstance(node, ast.Attribute)
        and node.attr in {"skip", "skipif", "xfail", "importorskip"}
    ):
        return f"a test that may not run ({node.attr})"
    return None


def swallows_everything(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.id if isinstance(handler.type, ast.Name) else None
    broad = handler.type is None or caught in {"Exception", "BaseException"}
    return broad and all(isinstance(inner, ast.Pass | ast.Continue) for inner in handler.body)


def is_sleep(call: ast.Call) -> bool:
    """`asyncio.sleep(0)` only yields to the loop, so it is not one."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    yields = (
        len(call.args) == 1 and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0
    )
    return name == "sleep" and not yields


def test_modules_have_docstrings() -> None:
    assert not [relative(path) for path in SOURCES if not ast.get_docstring(parsed(path))]


def test_checks_find_violations() -> None:
    assert (
        nesting(ast.parse("if a:\n  for b in c:\n    while d:\n      with e:\n        f()\n").body)
        == 4
    )
    assert nesting(ast.parse("try:\n  f()\nfinally:\n  if a: g()\n").body) == 2
    assert nesting(ast.parse("if a: b()\nelif c: d()\nelif e: f()\n").body) == 1
    assert not allowed("fleet.conductor", "fleet.conductor.driver.run_conductor")
    assert not allowed("web", "fleet.control.connect")
    assert allowed("web", "fleet.control.client.FleetClient")
    assert not allowed("fleet.engine.torch", "fleet.models.causal_lm")
    swallower = next(
        node
        for node in ast.walk(ast.parse("try: f()\nexcept Exception: pass"))
        if isinstance(node, ast.ExceptHandler)
    )
    assert swallows_everything(swallower)
