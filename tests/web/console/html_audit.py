"""What a page's HTML must be for everybody to use it: well nested, ids once, fields with labels, buttons with names."""

from collections import Counter
from html.parser import HTMLParser

VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
FIELDS = {"input", "select", "textarea"}
NAMED = {"button", "a", "summary"}


class Reader(HTMLParser):
    """Reads one page; `faults` says what is wrong with it."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []
        self.ids: Counter[str] = Counter()
        self.text: list[str] = []
        self._open: list[str] = []
        self._names: list[tuple[str, list[str], bool]] = []
        self._for: set[str] = set()
        self._fields: list[tuple[str, dict[str, str], bool]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.ids[given["id"]] += 1
        if "style" in given or any(name.startswith("on") for name in given):
            self.faults.append(f"<{tag}> has a style or a script of its own")
        if tag in ("script", "style") and "src" not in given:
            self.faults.append(f"<{tag}> inline")
        if tag == "label" and "for" in given:
            self._for.add(given["for"])
        if tag in FIELDS:
            self._fields.append((tag, given, "label" in self._open))
        if tag in NAMED:
            self._names.append((tag, [], "aria-label" in given))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open[-1] != tag:
            self.faults.append(f"</{tag}> closes <{self._open[-1] if self._open else 'nothing'}>")
            return
        self._open.pop()
        if tag in NAMED:
            name, words, labelled = self._names.pop()
            if not labelled and not "".join(words).strip():
                self.faults.append(f"a <{name}> without a name")

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        for _, words, _ in self._names:
            words.append(data)

    def finish(self) -> list[str]:
        self.close()
        self.faults += [f"<{tag}> is never closed" for tag in self._open]
        self.faults += [f"id {name!r} {count} times" for name, count in self.ids.items() if count > 1]
        for tag, given, wrapped in self._fields:
            if not (wrapped or "aria-label" in given or given.get("id") in self._for):
                self.faults.append(f"<{tag} name={given.get('name')!r}> without a label")
        return self.faults


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.finish()
    return reader
