"""A model hub on this machine: the endpoints that a download uses, and the faults of networks and
servers, set per file.
"""

import asyncio
import hashlib
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import unquote

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from fleet.process.free_ports import free_port
from tests.support import wait_until

LFS_BYTES = 1000
"""Files of this size or more are in LFS."""
PIECE_BYTES = 1 << 14


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def blob_id_of(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def hash_of(content: bytes) -> str:
    """Return the hash by which the hub names a file."""
    return sha256_of(content) if len(content) >= LFS_BYTES else blob_id_of(content)


@dataclass(slots=True)
class Sent:
    """A request for a file, as the server saw it. `start`: first byte that it asked for."""

    path: str
    start: int
    authorized: bool


@dataclass(slots=True)
class FakeHub:
    """`models`: files of each commit, by repository. `branches`: commits by repository and branch.
    `refusals`: status and error code of a repository's files, of which "*" means its information
    too. `cuts`: number of bytes after which the next answer of a file breaks off; `sent_instead`:
    content that is sent in place of a file's own. `ranges`: whether parts of files can be asked
    for. `hold_after`: bytes of a file after which its answer waits for `release`.
    """

    url: str = ""
    models: dict[str, dict[str, dict[str, bytes]]] = field(
        default_factory=dict[str, dict[str, dict[str, bytes]]]
    )
    branches: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    cards: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    refusals: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])
    cuts: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    sent_instead: dict[str, bytes] = field(default_factory=dict[str, bytes])
    hashes: dict[str, str] = field(default_factory=dict[str, str])
    hold_after: dict[str, int] = field(default_factory=dict[str, int])
    release: threading.Event = field(default_factory=threading.Event)
    ranges: bool = True
    sent: list[Sent] = field(default_factory=list[Sent])

    def publish(self, repo: str, files: dict[str, bytes], branch: str = "main") -> str:
        """Add a commit with `files` to a repository as the newest of a branch; return its id."""
        every = "".join(f"{path} {sha256_of(files[path])}" for path in sorted(files))
        commit = blob_id_of(f"{repo} {every}".encode())
        self.models.setdefault(repo, {})[commit] = files
        self.branches.setdefault(repo, {})[branch] = commit
        return commit

    def starts_of(self, path: str) -> list[int]:
        """Return the first byte of each request for a file."""
        return [one.start for one in self.sent if one.path == path]

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/api/models/{owner}/{name}/revision/{revision:path}", self._information),
                Route("/api/models/{owner}/{name}/tree/{commit}", self._tree),
                Route("/{owner}/{name}/resolve/{commit}/{path:path}", self._file),
                Route("/cdn/{repo:path}/at/{commit}/{path:path}", self._from_cdn),
            ]
        )

    def _find(self, request: Request, revision: str) -> tuple[str, str] | Response:
        repo = f"{request.path_params['owner']}/{request.path_params['name']}"
        if repo not in self.models:
            return JSONResponse(
                {"error": "not found"}, 404, headers={"X-Error-Code": "RepoNotFound"}
            )
        commit = self.branches[repo].get(revision, revision)
        if commit not in self.models[repo]:
            return JSONResponse(
                {"error": "no revision"}, 404, headers={"X-Error-Code": "RevisionNotFound"}
            )
        return repo, commit

    async def _information(self, request: Request) -> Response:
        found = self._find(request, unquote(request.path_params["revision"]))
        if isinstance(found, Response):
            return found
        repo, commit = found
        if repo in self.refusals and self.refusals[repo][1] == "*":
            return Response("<html>no", self.refusals[repo][0])
        siblings = [
            {
                "rfilename": path,
                "size": len(content),
                "blobId": self.hashes.get(path, blob_id_of(content)),
                **({"lfs": self._lfs(path, content)} if len(content) >= LFS_BYTES else {}),
            }
            for path, content in self.models[repo][commit].items()
        ]
        return JSONResponse(
            {
                "id": repo,
                "sha": commit,
                "tags": ["license:mit"],
                "cardData": self.cards.get(repo),
                "siblings": siblings,
            }
        )

    def _lfs(self, path: str, content: bytes) -> dict[str, object]:
        found = self.hashes.get(path, sha256_of(content))
        return {"size": len(content), "sha256": found, "oid": found, "pointerSize": 134}

    async def _tree(self, request: Request) -> Response:
        found = self._find(request, request.path_params["commit"])
        if isinstance(found, Response):
            return found
        repo, commit = found
        return JSONResponse(
            [
                {
                    "type": "file",
                    "path": path,
                    "size": len(content),
                    "oid": blob_id_of(content),
                    **({"lfs": self._lfs(path, content)} if len(content) >= LFS_BYTES else {}),
                }
                for path, content in self.models[repo][commit].items()
            ]
        )

    async def _file(self, request: Request) -> Response:
        found = self._find(request, request.path_params["commit"])
        if isinstance(found, Response):
            return found
        repo, commit = found
        path = request.path_params["path"]
        if repo in self.refusals and "authorization" not in request.headers:
            status, code = self.refusals[repo]
            return JSONResponse({"error": "no"}, status, headers={"X-Error-Code": code})
        elsewhere = self.url.replace("127.0.0.1", "localhost")
        return RedirectResponse(f"{elsewhere}/cdn/{repo}/at/{commit}/{path}", 302)

    async def _from_cdn(self, request: Request) -> Response:
        path = request.path_params["path"]
        content = self.models[request.path_params["repo"]][request.path_params["commit"]][path]
        content = self.sent_instead.get(path, content)
        asked = request.headers.get("range") if self.ranges else None
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        self.sent.append(Sent(path, start, "authorization" in request.headers))
        cuts = self.cuts.get(path)
        return _Body(
            content[start:],
            start,
            len(content),
            partial=asked is not None,
            cut=cuts.pop(0) if cuts else None,
            hold=self.hold_after.get(path),
            release=self.release,
        )


class _Body(Response):
    """The content of a file, in pieces, broken off after `cut` bytes."""

    def __init__(
        self,
        content: bytes,
        start: int,
        size: int,
        *,
        partial: bool,
        cut: int | None,
        hold: int | None,
        release: threading.Event,
    ) -> None:
        super().__init__(status_code=206 if partial else 200)
        self._content = content
        self._cut = cut
        self._hold = hold
        self._release = release
        self.headers["content-length"] = str(len(content))
        if partial:
            self.headers["content-range"] = f"bytes {start}-{size - 1}/{size}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        end = len(self._content) if self._cut is None else self._cut
        sent = 0
        for at in range(0, end, PIECE_BYTES):
            piece = self._content[at : min(end, at + PIECE_BYTES)]
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            sent += len(piece)
            if self._hold is not None and sent >= self._hold:
                await asyncio.to_thread(self._release.wait, 60)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@contextmanager
def serving_hub() -> Iterator[FakeHub]:
    """Context manager of an empty hub that answers at its `url`."""
    hub, port = FakeHub(), free_port()
    hub.url = f"http://127.0.0.1:{port}"
    # Broken answers are meant: the server's own errors about them are not shown.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    server = uvicorn.Server(
        uvicorn.Config(hub.app(), host="127.0.0.1", port=port, log_config=None, lifespan="off")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started, "the hub to answer")
    try:
        yield hub
    finally:
        hub.release.set()
        server.should_exit = server.force_exit = True
        thread.join(10)


def small_model(weights: Sequence[int] = range(4)) -> dict[str, bytes]:
    """Return the files of a model whose weights have 64 KiB for each number, with the files that
    published models have beside those that are needed.
    """
    content = b"".join(bytes([number]) * (1 << 16) for number in weights)
    return {
        "config.json": b'{"model_type": "small"}',
        "tokenizer.json": b"{}" * 600,
        "merges.txt": b"a b\n",
        "chat_template.jinja": b"{{ messages }}",
        "empty.txt": b"",
        "model.safetensors": content,
        "model.fp32-00001-of-00002.safetensors": b"the same again" * 100,
        "pytorch_model.bin": b"pickle" * 500,
        "tf_model.h5": b"h5" * 800,
        "flax_model.msgpack": b"m" * 1200,
        "onnx/config.json": b"{}",
        "onnx/model.onnx": b"o" * 2000,
        "README.md": b"# A model",
        ".gitattributes": b"*.bin",
    }
