"""Files of the hub's models on this host, in the cache layout of `huggingface_hub`, which other
programs share: `blobs` by hash, `snapshots` by commit, `refs` by branch. Uses no network.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from huggingface_hub import constants, get_cached_repo_tree
from huggingface_hub.errors import CachedRepoTreeNotFoundError
from huggingface_hub.file_download import repo_folder_name

from fleet.core.errors import ConfigError
from fleet.hub.names import HubName

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
COMMIT = re.compile(r"[0-9a-f]{40}")
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
TEXTS = frozenset({".json", ".txt", ".jinja", ".model", ".tiktoken"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """A model hub, and the folder of its files on this host.

    `folder`: folder of the cache; None for the folder of `huggingface_hub`, which is
    `~/.cache/huggingface/hub` unless environment variables move it. `endpoint`: address of the hub;
    None for the library's. `parts`: sub-folders of a model whose files are needed beside those at
    its top, such as one for each stage of a graph. `extras`: patterns of needed files beside
    configuration, tokenizer and safetensors.
    """

    folder: Path | None = None
    endpoint: str | None = None
    parts: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()

    @property
    def cache(self) -> Path:
        return (self.folder or Path(constants.HF_HUB_CACHE)).expanduser().absolute()

    @property
    def address(self) -> str:
        return self.endpoint or constants.ENDPOINT

    def home(self, name: HubName) -> Path:
        """Return the folder of a model, which has the files of all its revisions."""
        return self.cache / repo_folder_name(repo_id=name.repo, repo_type="model")

    def snapshot(self, name: HubName, commit: str) -> Path:
        return self.home(name) / "snapshots" / commit

    def commit(self, name: HubName) -> str | None:
        """Return the commit of a name's revision: a commit is returned as it is, downloaded or not;
        a branch or tag has the commit of its last download, or None if it was never downloaded.
        """
        if COMMIT.fullmatch(name.revision):
            return name.revision
        ref = self.home(name) / "refs" / name.revision
        return ref.read_text().strip() if ref.is_file() else None


def resolve(hub: Hub, name: HubName, field: str = "checkpoint") -> Path:
    """Return the folder with a model's files at its revision. Raises: ConfigError that names what
    is missing, and the command that downloads it. `field`: key of the configuration that has the
    name.
    """
    commit = hub.commit(name)
    if commit is None:
        raise _missing(field, f"{name} is not in {hub.cache}")
    try:
        tree = get_cached_repo_tree(name.repo, revision=commit, cache_dir=hub.cache)
    except CachedRepoTreeNotFoundError:
        raise _missing(field, f"{name} is not in {hub.cache} (commit {commit[:12]})") from None
    folder, size_of = hub.snapshot(name, commit), {file.path: file.size for file in tree}
    lacking = [path for path in select(hub, size_of) if _size(folder / path) != size_of[path]]
    if lacking:
        more = f" and {len(lacking) - 1} more files" if len(lacking) > 1 else ""
        raise _missing(field, f"{name} is incomplete in {hub.cache}: {lacking[0]}{more} missing")
    return folder


def select(hub: Hub, paths: Iterable[str]) -> list[str]:
    """Return the files that a stage reads: configuration, tokenizer, weights as safetensors, each
    once, and what the hub's extra patterns match. Files in other sub-folders, pickles and weights
    in other formats are left out.
    """
    of_part: dict[str, list[str]] = {part: [] for part in ("", *hub.parts)}
    for path in paths:
        part, _, rest = path.partition("/")
        if part in hub.parts and rest:
            of_part[part].append(rest)
        else:
            of_part[""].append(path)
    return sorted(
        f"{part}/{file}" if part else file
        for part, files in of_part.items()
        for file in files
        if _is_needed(hub, file, files)
    )


def _is_needed(hub: Hub, file: str, files: Collection[str]) -> bool:
    for pattern in hub.extras:
        if file.count("/") == pattern.count("/") and fnmatchcase(file, pattern):
            return True
    return "/" not in file and (PurePosixPath(file).suffix in TEXTS or file in _weights(files))


def _weights(files: Collection[str]) -> set[str]:
    """Return a folder's weight files. Some models have the same weights twice,
    for example in a second dtype.
    """
    weights = {file for file in files if file.endswith(".safetensors") and "/" not in file}
    shards = {file for file in weights if _SHARD.fullmatch(file)} if INDEX in files else set[str]()
    return shards or (weights & {SINGLE}) or weights


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _missing(field: str, what: str) -> ConfigError:
    return ConfigError(
        f"{field}: {what}; run `fleet models fetch --config FILE`, with the FILE and --set "
        "options of this command",
        param=field,
    )
