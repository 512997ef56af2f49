"""One mistake as the user should read it: the field, what is wrong with it, what to write instead. Knows the schema's shape only."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from fleet.config.names import dotted, meant, nearest, shown
from fleet.config.schema import FleetConfig, SamplingDefaults

Path = tuple[str | int, ...]
_NO_SECTION = {"model_type", "dict_type", "model_attributes_type"}


@dataclass(frozen=True, slots=True)
class Problem:
    """A mistake at `path`; `message` needs the field before it."""

    path: Path
    message: str

    @property
    def field(self) -> str:
        return dotted(self.path)


def first_problem(error: ValidationError, root: type[BaseModel] = FleetConfig, prefix: Path = ()) -> Problem:
    """The first mistake in declaration order, of a `root` that lies at `prefix`."""
    first = error.errors()[0]
    return Problem((*prefix, *first["loc"]), _message(first, root, prefix))


def _message(first: ErrorDetails, root: type[BaseModel], prefix: Path) -> str:
    kind, given = first["type"], first["input"]
    if kind == "extra_forbidden":
        return _unknown_key(first["loc"], root, prefix)
    if kind == "missing":
        return f"is missing; give {dotted((*prefix, *first['loc']))} too"
    if kind == "literal_error":
        known = re.findall(r"'([^']*)'", str(first.get("ctx", {})["expected"]))
        return f"{shown(given)} is not known; use {one_of(known)}{meant(given, known)}"
    if kind in _NO_SECTION and given is None:
        return "is empty; give it keys, or remove it"
    if kind in _NO_SECTION:
        return f"must be a section of keys and values (got {shown(given)})"
    if kind == "tuple_type":
        return f"must be a list, such as [2, 4, 8] (got {shown(given)})"
    return f"{first['msg'].removeprefix('Value error, ')} (got {shown(given)})"


def one_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _unknown_key(loc: Path, root: type[BaseModel], prefix: Path) -> str:
    key = str(loc[-1])
    here = tuple(_model_at(root, loc[:-1]).model_fields)
    near = nearest(key, here)
    if near:
        return f"unknown key; did you mean {dotted((*prefix, *loc[:-1], near))}?"
    if "." in key:
        return "unknown key; dots are for --set, in a file write each part as a section of its own"
    elsewhere = [name for name in _EVERY_KEY if name.split(".")[-1] == key]
    if elsewhere:
        return f"unknown key; did you mean {one_of(elsewhere)}?"
    return f"unknown key; remove it, or use one of {', '.join(here)}"


def _keys(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """Every key of a deployment, dotted; the names of stages and edges are left open."""
    for name, field in model.model_fields.items():
        yield above + name
        section, named = _section(field)
        if section:
            yield from _keys(section, f"{above}{name}.NAME." if named else f"{above}{name}.")


def _model_at(root: type[BaseModel], path: Path) -> type[BaseModel]:
    model, parts = root, iter(path)
    for part in parts:
        section, named = _section(model.model_fields[str(part)])
        assert section is not None, f"{dotted(path)} is no section"
        if named:
            next(parts)
        model = section
    return model


def _section(field: FieldInfo) -> tuple[type[BaseModel] | None, bool]:
    """The model beneath a field, and whether a name of the user's stands between them."""
    annotation = field.annotation
    named = get_origin(annotation) is dict
    for one in (annotation, *get_args(annotation)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return cast(type[BaseModel], one), named
    return None, named


_EVERY_KEY = (*_keys(FleetConfig), *_keys(SamplingDefaults, "stages.NAME.sampling."))
