"""A clause that is spoken by a request of its own, apart from the text that it belongs to."""

from fleet.processing.spoken.clauses import Clause

_FIELDS = ("starts_line", "ends_line", "is_code")


def place_of(clause: Clause) -> str:
    """Return the names of the clause's fields that are true, such as `starts_line,ends_line`, from
    which `GivenClause` restores the clause together with the text.
    """
    return ",".join(name for name in _FIELDS if getattr(clause, name))


class GivenClause:
    """Cutter of a text that is a single clause. `place`: result of `place_of` for the clause."""

    def __init__(self, place: str) -> None:
        self._place = place.split(",")
        self._text = ""

    def feed(self, piece: str) -> list[Clause]:
        self._text += piece
        return []

    def finish(self) -> list[Clause]:
        """Return the whole text that was fed as the only clause."""
        starts_line, ends_line, is_code = (name in self._place for name in _FIELDS)
        return [
            Clause(text=self._text, starts_line=starts_line, ends_line=ends_line, is_code=is_code)
        ]
