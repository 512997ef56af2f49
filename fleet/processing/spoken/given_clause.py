"""A clause that is spoken by a request of its own, apart from the text that it belongs to."""

from fleet.processing.spoken.clauses import Clause

_FIELDS = ("starts_line", "ends_line", "is_code")


def place_of(clause: Clause) -> str:
    """Return what a clause's text does not tell of it, for `GivenClause`: the names of its fields
    that are true, such as `starts_line,ends_line`.
    """
    return ",".join(name for name in _FIELDS if getattr(clause, name))


class GivenClause:
    """Cutter of a text that is one clause. `place`: the clause's `place_of`."""

    def __init__(self, place: str) -> None:
        self._place = place.split(",")
        self._text = ""

    def feed(self, piece: str) -> list[Clause]:
        self._text += piece
        return []

    def finish(self) -> list[Clause]:
        """Return the clause, which ends here."""
        starts_line, ends_line, is_code = (name in self._place for name in _FIELDS)
        return [
            Clause(text=self._text, starts_line=starts_line, ends_line=ends_line, is_code=is_code)
        ]
