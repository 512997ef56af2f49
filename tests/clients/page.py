"""The compatibility page `tests/clients/README.md`: which feature of which client works. Knows how
the page is written and read, not how features are checked.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.clients.environments import CLIENTS, ThirdPartyClient
from tests.clients.running import FeatureOutcome

PAGE = Path(__file__).parent / "README.md"
CHECK = re.compile(r"^(?:async )?(?:def|function) check_(\w+)\(", re.MULTILINE)
ROW = re.compile(r"^\| (.+?) \| (.+?) \| (.+?) \| (.+) \|$", re.MULTILINE)
INTRODUCTION = """\
# Third-party clients

Unmodified clients, each at a pinned release in an environment of its own, against a gateway. The
fleet behind it is in memory: its model does at once what a request asks for, by a call of a
function, JSON, an edit or a sentence. A feature passes if the client gives its user exactly that.

`python -m tests.clients` installs the clients, runs their scripts in `scripts/`, and writes this
page. `python -m tests.clients --only NAME ...` runs some, by the names of their scripts, and
replaces their rows. Wyoming's bridge needs Python 3.12 or later on the machine.

Open WebUI is a whole installation with the CPU build of torch (2.4 GB); its search over documents
is off. Of vLLM, the wheel and those of its dependencies are installed that its load tool imports
(2.3 GB). This tool's transcriptions send `max_completion_tokens`, which is refused by name, and
expect a stream in vLLM's own form.

Not run:

* vLLM-Omni 0.30.0 does not start with vLLM 0.33: "cannot import name 'RoutedExpertsLists' from
  'vllm.v1.outputs'". `tests/web/test_load_tools.py` reads answers as it does.
* SGLang's load tool after 0.5.9 imports its engine: 0.5.23 stops at `import triton`, and with
  Triton at `import torchvision`.

| client | version | feature | result |
|---|---|---|---|
"""


def features_of(client: ThirdPartyClient) -> list[str]:
    """Return the features that the client's script checks, in their order."""
    return CHECK.findall(client.path.read_text())


def rows_of(client: ThirdPartyClient, results: Sequence[FeatureOutcome]) -> list[tuple[str, ...]]:
    """Return the client's rows; a feature without a result gets one that says so."""
    found = {result.feature: result for result in results}
    return [
        (client.title, client.version, feature.replace("_", " "), outcome(found.get(feature)))
        for feature in features_of(client)
    ]


def outcome(result: FeatureOutcome | None) -> str:
    if result is None:
        return "fails: the script ended before this feature"
    if result.ok:
        return "passes"
    why = " ".join(result.why.split()).replace("|", "/")
    return f"fails: {why[:300]}"


def write_page(results: Mapping[str, Sequence[FeatureOutcome]]) -> None:
    """Write the page from the results of clients, by name; rows of others stay as they are."""
    shown = rows_shown()
    rows = [
        row
        for client in CLIENTS
        for row in (
            rows_of(client, results[client.name])
            if client.name in results
            else [row for row in shown if row[0] == client.title]
        )
    ]
    lines = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    PAGE.write_text(INTRODUCTION + lines)


def rows_shown() -> list[tuple[str, ...]]:
    """Return the rows of the page as it is: client, version, feature, result."""
    rows = ROW.findall(PAGE.read_text())
    return [row for row in rows if row[0] != "client"]
