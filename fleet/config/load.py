"""Reader of deployment files with `--set` overrides; every mistake becomes one line. Knows no
process.
"""

from pathlib import Path
from typing import cast

from pydantic import ValidationError

from fleet.config.names import format_value, join_path
from fleet.config.problems import Problem, first_problem
from fleet.config.rules import find_first_problem
from fleet.config.schema import FleetConfig
from fleet.config.yaml_text import Malformed, parse_yaml
from fleet.core.errors import ConfigError

Tree = dict[str, object]
MAX_FILE_BYTES = 1024 * 1024


def load_config(path: Path | None, overrides: tuple[str, ...] = ()) -> FleetConfig:
    """Read `path` (None: all defaults), apply `KEY=VALUE` overrides, check the whole.

    Raises: ConfigError with one line that names the file or the override, the field and the remedy.
    """
    tree = apply_overrides(_read(path) if path else {}, overrides)
    try:
        config = FleetConfig.model_validate(tree)
    except ValidationError as error:
        raise _refusal(path, overrides, first_problem(error)) from error
    problem = find_first_problem(config)
    if problem is not None:
        raise _refusal(path, overrides, problem)
    return config


def apply_overrides(tree: Tree, overrides: tuple[str, ...]) -> Tree:
    """Set `KEY=VALUE` overrides in a parsed deployment: dotted keys, values parsed as YAML, such as
    `stages.NAME.max_batch=8` or `checkpoint=/models/x`. The override `checkpoint` is for all
    stages: it also replaces the checkpoints of single stages that the file names.

    Raises: ConfigError naming the override.
    """
    result = _copy(tree)
    changes: list[tuple[list[str], object, str]] = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(
                f"--set {format_value(text)}: write KEY=VALUE, such as --set web.port=8001",
                param="--set",
            )
        parts = _parts(key)
        if not all(parts):
            raise ConfigError(
                f"--set {format_value(text)}: a part of the key is empty; write KEY as in web.port",
                param="--set",
            )
        changes.append((parts, _parse(parts, value), text))
    if any(parts == ["checkpoint"] for parts, _, _ in changes):
        _drop_stage_checkpoints(result)
    for parts, value, text in changes:
        _set(result, parts, value, text)
    return result


def _drop_stage_checkpoints(tree: Tree) -> None:
    stages = tree.get("stages")
    for stage in cast(Tree, stages).values() if isinstance(stages, dict) else ():
        if isinstance(stage, dict):
            cast(Tree, stage).pop("checkpoint", None)


def _parts(key: str) -> list[str]:
    return [part.strip() for part in key.split(".")]


def _parse(parts: list[str], value: str) -> object:
    if not value:
        return ""
    try:
        return parse_yaml(value)
    except Malformed as error:
        at = join_path([*parts, error.field]) if error.field else join_path(parts)
        raise ConfigError(
            f"--set {at}: {format_value(value)} is not a YAML value: {error.problem}", param=at
        ) from error


def _set(tree: Tree, path: list[str], value: object, text: str) -> None:
    node = tree
    for depth, part in enumerate(path[:-1], start=1):
        child = node.get(part)
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict):
            field = join_path(path[:depth])
            raise ConfigError(
                f"--set {format_value(text)}: {field} is a value, not a section; set {field} "
                "itself",
                param=field,
            )
        node = cast(Tree, child)
    node[path[-1]] = value


def _copy(tree: Tree) -> Tree:
    return {
        key: _copy(cast(Tree, value)) if isinstance(value, dict) else value
        for key, value in tree.items()
    }


def _read(path: Path) -> Tree:
    text = _read_text(path)
    try:
        tree = parse_yaml(text)
    except Malformed as error:
        raise ConfigError(f"{path}: {error.message}", param=error.field or "--config") from error
    if tree is None:
        raise ConfigError(
            f"{path}: is empty; write {{}} into it to use all defaults", param="--config"
        )
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path}: must be a mapping of keys to values, not {_noun(tree)}", param="--config"
        )
    return cast(Tree, tree)


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path}: no such configuration file; check --config and FLEET_CONFIG", param="--config"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}; check its permissions", param="--config"
        ) from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{path}: is not UTF-8 (line {line}); save it as UTF-8", param="--config"
        ) from error
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(
            f"{path}: is larger than {MAX_FILE_BYTES} bytes, which no deployment file is; check "
            "--config and FLEET_CONFIG",
            param="--config",
        )
    return text


def _noun(tree: object) -> str:
    return "a list" if isinstance(tree, list) else "a single value"


def _refusal(path: Path | None, overrides: tuple[str, ...], problem: Problem) -> ConfigError:
    """Return the ConfigError for a mistake. The message names the override that set the field, or
    else the file.
    """
    keys = [tuple(_parts(text.partition("=")[0])) for text in overrides]
    at = problem.path
    where = (
        "--set "
        if any(key == at[: len(key)] or at == key[: len(at)] for key in keys)
        else f"{path or 'the defaults'}: "
    )
    return ConfigError(f"{where}{problem.field}: {problem.message}", param=problem.field)
