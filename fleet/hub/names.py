"""Names of models on the hub, as a deployment's `checkpoint` gives them. Imports nothing heavy."""

import re
from dataclasses import dataclass
from pathlib import Path

DEFAULT_REVISION = "main"
_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+)(?:@(?P<revision>\w[\w./-]*))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A model on the hub at a revision: a branch, a tag or a commit."""

    repo: str
    revision: str = DEFAULT_REVISION

    def __str__(self) -> str:
        return self.repo if self.revision == DEFAULT_REVISION else f"{self.repo}@{self.revision}"


def hub_name_of(checkpoint: str) -> HubName | None:
    """Return the hub name that a `checkpoint` gives, or None if it gives a folder: a path that
    exists, or that cannot be a hub name `owner/name[@revision]`.
    """
    found = _NAME.fullmatch(checkpoint)
    if found is None or ".." in checkpoint or Path(checkpoint).expanduser().exists():
        return None
    return HubName(repo=found["repo"], revision=found["revision"] or DEFAULT_REVISION)
