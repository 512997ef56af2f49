"""Reading a deployment file with `--set` overrides, and turning every mistake into one line. Knows no process."""

from pathlib import Path
from typing import cast

import yaml
from pydantic import ValidationError

from fleet.config.schema import FleetConfig
from fleet.core.errors import ConfigError

Tree = dict[str, object]


def load_config(path: Path | None, overrides: tuple[str, ...] = ()) -> FleetConfig:
    """Read `path` (None: all defaults), apply `KEY=VALUE` overrides, check the whole.

    Raises: ConfigError with one line that names the file, the field and the fix.
    """
    where = str(path) if path else "the defaults"
    tree = _read(path) if path else {}
    tree = apply_overrides(tree, overrides)
    try:
        return FleetConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_first_problem(error)}", param=_first_field(error)) from error


def apply_overrides(tree: Tree, overrides: tuple[str, ...]) -> Tree:
    """Set dotted keys, values parsed as YAML: `stages.NAME.max_batch=8`, `checkpoint=/models/x`."""
    result = _copy(tree)
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {text!r}: write KEY=VALUE, such as --set web.port=8001", param="--set")
        try:
            parsed: object = yaml.safe_load(value) if value else ""
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {key}: {value!r} is not a YAML value", param=key) from error
        _set(result, key.strip().split("."), parsed, text)
    return result


def _set(tree: Tree, path: list[str], value: object, text: str) -> None:
    node = tree
    for part in path[:-1]:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {text!r}: {part} is a value, not a section", param=part)
        node = cast(Tree, child)
    node[path[-1]] = value


def _copy(tree: Tree) -> Tree:
    return {key: _copy(cast(Tree, value)) if isinstance(value, dict) else value for key, value in tree.items()}


def _read(path: Path) -> Tree:
    try:
        tree = yaml.safe_load(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such configuration file", param="--config") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", param="--config") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark else ""
        raise ConfigError(f"{path}: not valid YAML{line}: {getattr(error, 'problem', error)}", param="--config") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must be a mapping of keys to values, not {type(tree).__name__}", param="--config")
    return cast(Tree, tree)


def _first_field(error: ValidationError) -> str:
    return ".".join(str(part) for part in error.errors()[0]["loc"])


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    field = _first_field(error)
    if first["type"] == "extra_forbidden":
        return f"{field}: unknown key; remove it or check its spelling"
    message = first["msg"].removeprefix("Value error, ")
    return f"{field}: {message} (got {first['input']!r})" if field else message
