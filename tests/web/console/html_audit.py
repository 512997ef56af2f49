"""Checks a page's HTML: element nesting, unique ids, labels of form fields, names of buttons."""

from collections import Counter
from html.parser import HTMLParser

VOID = {
    "area",
    "base",
    "br",
    "col",
    "embed",
    "hr",
    "img",
    "input",
    "link",
    "meta",
    "source",
    "track",
    "wbr",
}
FIELDS = {"input", "select", "textarea"}
NAMED = {"button", "a", "summary"}


class PageAudit(HTMLParser):
    """Parses one page; `faults` lists its errors."""

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
        attributes = {name: value or "" for name, value in attrs}
        if "id" in attributes:
            self.ids[attributes["id"]] += 1
        if "style" in attributes or any(name.startswith("on") for name in attributes):
            self.faults.append(f"<{tag}> has an inline style or script")
        is_data = attributes.get("type") == "application/json"
        if tag in ("script", "style") and "src" not in attributes and not is_data:
            self.faults.append(f"<{tag}> inline")
        if tag == "label" and "for" in attributes:
            self._for.add(attributes["for"])
        if tag in FIELDS:
            self._fields.append((tag, attributes, "label" in self._open))
        if tag in NAMED:
            self._names.append((tag, [], "aria-label" in attributes))
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
            name, text, labelled = self._names.pop()
            if not labelled and not "".join(text).strip():
                self.faults.append(f"a <{name}> without a name")

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        for _, text, _ in self._names:
            text.append(data)

    def finish(self) -> list[str]:
        self.close()
        self.faults += [f"<{tag}> is never closed" for tag in self._open]
        self.faults += [
            f"id {name!r} {count} times" for name, count in self.ids.items() if count > 1
        ]
        for tag, attributes, wrapped in self._fields:
            if not (wrapped or "aria-label" in attributes or attributes.get("id") in self._for):
                self.faults.append(f"<{tag} name={attributes.get('name')!r}> without a label")
        return self.faults


def read(html: str) -> PageAudit:
    reader = PageAudit()
    reader.feed(html)
    reader.finish()
    return reader
