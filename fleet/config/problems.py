"""Mistakes in a deployment as one line for the user: the field, the cause, the remedy. Knows only
the shape of the schema.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from fleet.config.names import find_nearest, format_value, join_path, suggest
from fleet.config.schema import FleetConfig
from fleet.config.stage_schema import SamplingDefaults

Place = tuple[str | int, ...]
_NO_SECTION = {"model_type", "dict_type", "model_attributes_type"}
_ELSEWHERE = "set REDIS_URL in the environment to use a Redis that runs elsewhere"
_HINTS: dict[Place, str] = {
    ("redis", "url"): _ELSEWHERE,
    ("redis", "host"): _ELSEWHERE,
    ("sampling", "seed"): "the seed is a parameter of each request",
    ("sampling", "stop"): "stop strings are parameters of each request",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """A mistake in a deployment: `path` is the field, and `message` completes a sentence that
    begins with the field's name.
    """

    path: Place
    message: str

    @property
    def field(self) -> str:
        return join_path(self.path)


def first_problem(
    error: ValidationError, root: type[BaseModel] = FleetConfig, section: Place = ()
) -> Problem:
    """Return the first mistake that pydantic found in a deployment, in declaration order; unknown
    keys come last.

    `root`: pydantic model of the validated part; `section`: path of that part in the deployment.
    """
    first = error.errors()[0]
    loc, kind = first["loc"], first["type"]
    path = (*section, *loc)
    if kind == "extra_forbidden":
        return Problem(path, _unknown_key(path, _model_at(root, loc[:-1])))
    if path[-2:-1] == ("sampling",) and path[-1] not in SamplingDefaults.model_fields:
        return Problem(path, _unknown_key(path, SamplingDefaults))
    if kind == "missing":
        choices = get_args(_model_at(root, loc[:-1]).model_fields[str(loc[-1])].annotation)
        return Problem(path, f"is missing; set it to {one_of(choices)}")
    return Problem(path, _wrong_value(kind, first["msg"], first["input"]))


def _wrong_value(kind: str, reason: str, value: object) -> str:
    if kind == "literal_error":
        known = re.findall(r"'([^']*)'", reason)
        return (
            f"{format_value(value)} is not a known value; use "
            f"{one_of(known)}{suggest(value, known)}"
        )
    if kind in _NO_SECTION and value is None:
        return "is empty; add keys, or remove it"
    if kind in _NO_SECTION:
        return f"must be a section of keys and values (got {format_value(value)})"
    if kind == "tuple_type":
        example = f"[{value}]" if isinstance(value, str) and value else "[2, 4, 8]"
        return f"must be a list, such as {example} (got {format_value(value)})"
    return f"{reason.removeprefix('Value error, ')} (got {format_value(value)})"


def one_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _unknown_key(path: Place, model: type[BaseModel]) -> str:
    """Return the message about an unknown key, the last part of `path`. `model`: section that has
    no such key.
    """
    key, here = str(path[-1]), tuple(model.model_fields)
    hint = _HINTS.get(path[-2:])
    if hint:
        return f"unknown key; {hint}"
    near = find_nearest(key, here)
    if near:
        return f"unknown key; did you mean {join_path((*path[:-1], near))}?"
    if "." in key:
        return "unknown key; dotted keys are for --set, in a file write each part as a section"
    elsewhere = [name for name in _EVERY_KEY if name.split(".")[-1] == key]
    if elsewhere:
        return f"unknown key; did you mean {one_of(elsewhere)}?"
    return f"unknown key; remove it, or use one of {', '.join(here)}"


def _keys(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """Yield every key of a section and its subsections, dotted, with NAME in place of stage and
    edge names. `above`: prefix of the keys.
    """
    for name, field in model.model_fields.items():
        yield above + name
        section, named = _section(field)
        if section:
            yield from _keys(section, f"{above}{name}.NAME." if named else f"{above}{name}.")


def _model_at(root: type[BaseModel], path: Place) -> type[BaseModel]:
    model, parts = root, iter(path)
    for part in parts:
        section, named = _section(model.model_fields[str(part)])
        assert section is not None, f"{join_path(path)} is not a section"
        if named:
            next(parts)
        model = section
    return model


def _section(field: FieldInfo) -> tuple[type[BaseModel] | None, bool]:
    """Return the pydantic model of a field that is a section, or None for a plain value; and True
    if the field is a mapping from user-chosen names to such sections, else False.
    """
    annotation = field.annotation
    named = get_origin(annotation) is dict
    for one in (annotation, *get_args(annotation)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one, named
    return None, named


_EVERY_KEY = (*_keys(FleetConfig), *_keys(SamplingDefaults, "stages.NAME.sampling."))
