"""Table of a request's fields, and the check of a request against it. Knows no route."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, cast

from pydantic import BaseModel

from fleet.core.errors import SHOWN_CHARS, BadInput, UnsupportedValue

Verdict = Literal["served", "refused", "ignored"]
MAX_UNKNOWN_FIELDS = 256
"""Limit of the unknown fields with a neutral value in one object."""
MAX_NEUTRAL_DEPTH = 4
UNKNOWN = (
    "there is no such field here, and it might change the answer; remove it from the request, "
    "or turn it off in the client's "
    "settings"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A row of a field table: a field, and whether it is served, refused or ignored.

    `path` names the field from the body's root; `[]` stands for the index of a list, and `*` for
    any key.
    `reason` is cause and remedy for a refused field, or why an ignored field cannot change the
    answer.
    `accepted` lists values of a refused field that mean the same as its absence; null always does.
    If `accepted` is None, all empty values and false are accepted.
    `checked_by_value` is True if code of the route decides by the value; `reason` then says which
    values are served.
    """

    path: str
    verdict: Verdict
    reason: str = ""
    accepted: tuple[object, ...] | None = None
    checked_by_value: bool = False


def served(paths: str, reason: str = "") -> list[Field]:
    """Return rows of served fields. `paths` are one or several paths, separated by spaces."""
    return [Field(path=path, verdict="served", reason=reason) for path in paths.split()]


def refused(paths: str, reason: str, *, accepted: tuple[object, ...] | None = None) -> list[Field]:
    return [
        Field(path=path, verdict="refused", reason=reason, accepted=accepted)
        for path in paths.split()
    ]


def refused_by_value(paths: str, reason: str) -> list[Field]:
    """Return rows of fields with served and unserved values; code of the route refuses the unserved
    values.
    """
    return [
        Field(path=path, verdict="refused", reason=reason, checked_by_value=True)
        for path in paths.split()
    ]


def ignored(paths: str, reason: str) -> list[Field]:
    return [Field(path=path, verdict="ignored", reason=reason) for path in paths.split()]


def under(prefix: str, *groups: Sequence[Field]) -> list[Field]:
    """Return the rows of `groups` with a prefix before their paths: `session` and `audio` make
    `session.audio`.
    """
    return [replace(row, path=f"{prefix}.{row.path}") for group in groups for row in group]


class Given(NamedTuple):
    """A field that a request contains. `where` is its place in errors, such as `messages[0].name`;
    `row` is the row that decides about it, None for an unknown field.
    """

    where: str
    row: Field | None
    value: object


class FieldTable:
    """The rows of all fields of one route or event. Raises: ValueError if two rows have the same
    path.
    """

    def __init__(self, title: str, *groups: Sequence[Field]) -> None:
        self.title = title
        self.rows = [row for group in groups for row in group]
        self._by_path = {row.path: row for row in self.rows}
        if len(self._by_path) < len(self.rows):
            paths = [row.path for row in self.rows]
            raise ValueError(
                f"{title}: {sorted(path for path in set(paths) if paths.count(path) > 1)} have "
                "two rows"
            )
        self._open = {
            path[:at] for path in self._by_path for at, char in enumerate(path) if char in ".["
        }
        """Paths of the objects and lists that contain fields with rows."""

    def without(self, names: str) -> list[Field]:
        """Return the rows of all top-level fields but `names`, which are separated by spaces."""
        left_out = set(names.split())
        return [row for row in self.rows if row.path.split(".")[0].split("[")[0] not in left_out]

    def row_of(self, path: str) -> Field | None:
        """Return the row that decides about a field: its own row, or the row of an object around it
        that is refused or ignored; None for an unknown field.
        """
        for end in [at for at, char in enumerate(path) if char in ".["] + [len(path)]:
            row = self._by_path.get(path[:end])
            if row is not None and (end == len(path) or (row.verdict != "served")):
                return row
        return None

    def refusals(
        self, body: BaseModel | Mapping[str, object], where: str = ""
    ) -> Iterator[UnsupportedValue]:
        """Yield the refusal of each field of `body` that has a value and is not served. `where` is
        the place of `body` in a larger body.

        Raises: BadInput for too many unknown fields.
        """
        for given in self._walk(body, where, where):
            if (error := refusal_of(given)) is not None:
                yield error

    def check(self, body: BaseModel | Mapping[str, object]) -> None:
        """Check that all fields of `body` are served or ignored.

        Raises: UnsupportedValue naming the first refused field; BadInput for too many unknown
        fields.
        """
        for error in self.refusals(body):
            raise error

    def ignored(self, body: BaseModel | Mapping[str, object], where: str = "") -> list[Given]:
        """List the fields of `body` that have a value but no effect. `where` is the place of `body`
        in a larger body.
        """
        found = [
            given
            for given in self._walk(body, where, where)
            if given.row is None or given.row.verdict == "ignored"
        ]
        return [given for given in found if given.row is not None and not is_neutral(given.value)]

    def _walk(self, body: object, path: str, where: str) -> Iterator[Given]:
        num_unknown = 0
        for name, value in _items(body):
            full, place = (
                f"{path}.{name}" if path else name,
                f"{where}.{name[:SHOWN_CHARS]}" if where else name[:SHOWN_CHARS],
            )
            row = self._by_path.get(full)
            num_unknown += row is None
            if num_unknown > MAX_UNKNOWN_FIELDS:
                reason = f"more than {MAX_UNKNOWN_FIELDS} unknown fields; remove some"
                raise BadInput(f"{where or 'the body'}: {reason}", param=where or None)
            yield Given(place, row, value)
            if row is not None and row.verdict == "served" and full in self._open:
                yield from self._inner(value, full, place)

    def _inner(self, value: object, path: str, where: str) -> Iterator[Given]:
        if isinstance(value, list):
            if f"{path}[]" not in self._open:
                return
            for index, item in enumerate(cast("list[object]", value)):
                yield from self._walk(item, f"{path}[]", f"{where}[{index}]")
        else:
            yield from self._walk(value, path, where)


def refusal_of(given: Given) -> UnsupportedValue | None:
    """Return the refusal of a field; None if it is served or ignored, or if its value means the
    same as its absence.
    """
    where, row, value = given
    if row is None:
        return None if is_neutral(value) else UnsupportedValue(f"{where}: {UNKNOWN}", param=where)
    if row.verdict != "refused" or row.checked_by_value or _is_accepted(row, value):
        return None
    return UnsupportedValue(f"{where}: {row.reason}", param=where)


def is_neutral(value: object, depth: int = MAX_NEUTRAL_DEPTH) -> bool:
    """Return True for a value that clients send for an unset field: null, false, an empty value, or
    a container of only such values.
    """
    if value is None or value is False or value == "":
        return True
    if isinstance(value, dict):
        inner = list(cast("dict[str, object]", value).values())
    elif isinstance(value, list):
        inner = cast("list[object]", value)
    else:
        return False
    return not inner or (depth > 0 and all(is_neutral(each, depth - 1) for each in inner))


def _is_accepted(row: Field, value: object) -> bool:
    if row.accepted is None:
        return is_neutral(value)
    return value is None or any(
        isinstance(value, bool) == isinstance(one, bool) and value == one for one in row.accepted
    )


def _items(body: object) -> Iterator[tuple[str, object]]:
    """Yield names and values of the fields that a body contains; fields of a model that the request
    did not set are left out.
    """
    if isinstance(body, BaseModel):
        for name, field in type(body).model_fields.items():
            if name in body.model_fields_set:
                yield field.alias or name, getattr(body, name)
        yield from (body.model_extra or {}).items()
    elif isinstance(body, Mapping):
        yield from cast("Mapping[str, object]", body).items()
