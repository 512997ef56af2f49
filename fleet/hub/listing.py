"""What the hub says of a model: its commit, licence and needed files, with the hash that each must
have. Downloads no file.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from errno import ENOSPC
from pathlib import PurePosixPath

import httpx2
from huggingface_hub import HfApi
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import ModelInfo, RepoSibling

from fleet.core.errors import ConfigError, NoSafeWeights
from fleet.hub.cache import COMMIT, TEXTS, Hub, select
from fleet.hub.names import HubName

TIMEOUT_S = 30.0
LOGIN = "log in with `hf auth login`, or set HF_TOKEN"
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """A file of a model. `hash`: SHA-256 of the file (64 hexadecimal digits) if it is in LFS, else
    SHA-1 of its Git blob (40 digits).
    """

    path: str
    size: int
    hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The needed files of a model at one commit."""

    name: HubName
    commit: str
    licence: str
    files: tuple[HubFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def read_listing(hub: Hub, name: HubName, suffixes: tuple[str, ...] = ("",)) -> Listing:
    """Ask the hub for a model's needed files, or only for those with one of the suffixes.

    Raises: ConfigError if the hub cannot be reached, refuses, has no such model or revision, names
    a file that cannot be stored safely, or has no weights as safetensors.
    """
    with explaining(hub, name):
        info = HfApi(endpoint=hub.endpoint).model_info(
            name.repo, revision=name.revision, files_metadata=True, timeout=TIMEOUT_S
        )
        siblings = {file.rfilename: file for file in info.siblings or ()}
        files = tuple(
            _checked(name, siblings[path])
            for path in select(hub, _safe(name, siblings))
            if path.endswith(suffixes)
        )
        if "" in suffixes and all(PurePosixPath(file.path).suffix in TEXTS for file in files):
            raise NoSafeWeights.of(name, "*.safetensors")
        if not COMMIT.fullmatch(info.sha or ""):
            raise ValueError(f"commit {info.sha!r}")
        return Listing(name=name, commit=info.sha or "", licence=_licence(info), files=files)


def _safe(name: HubName, paths: Iterable[str]) -> Iterator[str]:
    """Yield the paths. Raises: ConfigError for one that leads out of the model's folder."""
    for path in paths:
        if "\\" in path or "\0" in path or {"", ".", ".."} & {*path.split("/")}:
            raise ConfigError(
                f"checkpoint: {name} has a file {path!r}, whose name leads out of its folder; "
                "nothing is downloaded",
                param="checkpoint",
            )
        yield path


def _checked(name: HubName, file: RepoSibling) -> HubFile:
    found = file.lfs.sha256 if file.lfs else file.blob_id
    if file.size is None or found is None or not _HASH.fullmatch(found):
        raise ConfigError(
            f"checkpoint: {name}: the hub gives no size and hash of {file.rfilename}, so it cannot "
            "be checked; nothing is downloaded",
            param="checkpoint",
        )
    return HubFile(path=file.rfilename, size=file.size, hash=found)


def _licence(info: ModelInfo) -> str:
    card = info.card_data
    named = card and (card.get("license_name") or card.get("license"))
    link = card and card.get("license_link")
    tags = (tag.removeprefix("license:") for tag in info.tags or () if tag.startswith("license:"))
    text = str(named or next(tags, "not stated"))
    return f"{text} ({link})" if link else text


@contextmanager
def explaining(hub: Hub, name: HubName) -> Iterator[None]:
    """Context manager that converts errors of the hub, the network and the disk to a ConfigError
    of one line with the cause and the remedy.
    """
    try:
        yield
    except (httpx2.HTTPError, OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"checkpoint: {name}: {_explanation(hub, name, error)}", param="checkpoint"
        ) from error


def _explanation(hub: Hub, name: HubName, error: Exception) -> str:
    reason = next(iter(str(error).splitlines()), "") or type(error).__name__
    match error:
        case GatedRepoError():
            return f"access is gated; accept the terms at {hub.address}/{name.repo}, then {LOGIN}"
        case RevisionNotFoundError():
            return f"the model has no revision {name.revision}; correct it after the @"
        case RepositoryNotFoundError():
            return f"{hub.address} shows no such model; correct the name or, if private, {LOGIN}"
        case HFValidationError():
            return f"not a name of the hub: {reason}"
        case OfflineModeIsEnabled():
            return "HF_HUB_OFFLINE is set; unset it, or set the folder of a copy as checkpoint"
        case HfHubHTTPError() if error.response.status_code in (401, 403):
            return (
                f"{hub.address} refuses access ({error.response.status_code}); correct the name, "
                f"or {LOGIN}"
            )
        case HfHubHTTPError():
            return f"{hub.address} answered {error.response.status_code}; try again later"
        case httpx2.HTTPError():
            return (
                f"no connection to {hub.address} ({reason}); check the network and proxy and run "
                "the command again, or set the folder of a copy as checkpoint"
            )
        case OSError() if error.errno == ENOSPC:
            return (
                f"the disk of {hub.cache} is full; free space and run the command again, which "
                "continues, or set another folder as hub_cache"
            )
        case OSError():
            return f"{error.filename or hub.cache}: {error.strerror or reason}"
        case _:
            return f"{hub.address} does not answer as a model hub ({reason}); check HF_ENDPOINT"
