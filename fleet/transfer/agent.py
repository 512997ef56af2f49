"""A NIXL agent behind typed calls; every failure of NIXL is a TransferError. Knows addresses, but
neither slots nor requests.

NIXL's bindings are called without its Python wrapper, for two reasons. The wrapper fixes the
progress thread's delay at 0, which spins (0.95 of a core per idle agent, measured with 1.5.1; 0.007
at 10 ms, at the same latency, since traffic wakes the thread). And its transfer handles keep the
agent alive, while the end of an agent must be certain here (see `closing`). Descriptors are
(address, length, device) tuples and metadata is NIXL's own `nixlSerDes` form; neither is ever a
pickle. Reads of GPU memory have never run on a GPU: this code was tested with doubles, and with a
NIXL that refuses to register GPU memory.
"""

import hashlib
import importlib
import logging
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import distributions
from typing import Protocol, cast

from fleet.core.errors import TransferError
from fleet.core.pages import Memory, Span
from fleet.transfer import closing
from fleet.transfer.closing import AgentClosing, destroy
from fleet.transfer.reach import LOCAL, Reach
from fleet.transfer.watch import WATCH, WatchedAgent, found_threads

BACKEND = "UCX"
HOST_DEVICE = 0
DIGEST_BYTES = 16
ADDRESS = struct.Struct("<Q")
"""Format of the memory address that follows NIXL's own metadata: an address that the agent has
registered.
"""
PROGRESS_DELAY_US = 10_000
"""Longest sleep of NIXL's progress thread when nothing happens."""


def check_metadata(peer: str, metadata: bytes) -> None:
    """Raise TransferError if metadata is damaged or does not belong to agent `peer`, before an
    agent is created to read from it.

    NIXL parses any metadata, and closing an agent right after its creation may crash the process
    (UCX 1.23, shared memory).
    """
    signed, digest = metadata[:-DIGEST_BYTES], metadata[-DIGEST_BYTES:]
    if digest != _digest(peer, signed):
        raise TransferError(
            f"NIXL could not load a peer's metadata: it is damaged, or not that of {peer}"
        )


def readable_address(metadata: bytes) -> int:
    """Return the address of registered memory that an agent's metadata names. The metadata must
    have passed `check_metadata`.
    """
    (address,) = ADDRESS.unpack(metadata[-DIGEST_BYTES - ADDRESS.size : -DIGEST_BYTES])
    return address


def _digest(name: str, metadata: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + metadata).digest()[:DIGEST_BYTES]


class _Config(Protocol):
    useProgThread: bool
    useListenThread: bool
    pthrDelay: int


class _NixlAgent(Protocol):
    def createBackend(self, name: str, parameters: dict[str, str], /) -> int: ...
    def registerMem(self, descriptors: object, backends: Sequence[int], /) -> object: ...
    def getLocalMD(self) -> bytes: ...
    def loadRemoteMD(self, metadata: bytes, /) -> bytes: ...
    def createXferReq(
        self,
        operation: object,
        local: object,
        remote: object,
        agent: str,
        note: bytes,
        backends: Sequence[int],
        /,
    ) -> int: ...
    def postXferReq(self, handle: int, note: bytes, /) -> object: ...
    def getXferStatus(self, handle: int, /) -> object: ...
    def releaseXferReq(self, handle: int, /) -> object: ...


class _Bindings(Protocol):
    """The functions of `nixl._bindings` that Fleet uses."""

    DRAM_SEG: object
    VRAM_SEG: object
    NIXL_READ: object
    NIXL_SUCCESS: object

    def nixlAgentConfig(self) -> _Config: ...
    def nixlAgent(self, name: str, config: _Config, /) -> _NixlAgent: ...
    def nixlRegDList(self, kind: object, regions: list[tuple[int, int, int, str]], /) -> object: ...
    def nixlXferDList(self, kind: object, spans: list[tuple[int, int, int]], /) -> object: ...


def load_bindings() -> _Bindings:
    """Import and return NIXL's bindings. Raises: ImportError where NIXL is not installed or its
    libraries are not found.
    """
    # Read by UCX and NIXL when they are loaded, and by nothing else. Their error lines would
    # repeat, for every dead peer, what TransferError says once. `setdefault` keeps the operator's
    # setting, to debug the transport itself.
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    # Importing NIXL disables error reports of log handlers for the whole process.
    raise_exceptions = logging.raiseExceptions
    try:
        return cast(_Bindings, importlib.import_module("nixl._bindings"))
    finally:
        logging.raiseExceptions = raise_exceptions


def has_cuda_transports() -> bool:
    """Return True if an installed NIXL package contains UCX's transports for GPU memory. Imports
    nothing.
    """
    installed = (
        package.files or () for package in distributions() if package.name.startswith("nixl")
    )
    return any("libuct_cuda" in file.name for files in installed for file in files)


class Agent:
    """A NIXL agent over regions of memory, with its progress thread.

    Invariants: once the agent has closed, reads that it started can no longer write to the memory.
    No other call ensures that: with NIXL 1.5.1 over TCP, a read in progress completes even after
    its handle was released and the remote agent removed.
    Raises: TransferError from every method when NIXL fails.
    """

    def __init__(self, name: str, regions: Sequence[Memory], reach: Reach = LOCAL) -> None:
        reach.enforce()
        self._name = name
        self._bindings = load_bindings()
        self._errors = tuple(
            value
            for value in vars(self._bindings).values()
            if isinstance(value, type) and issubclass(value, Exception)
        )
        config = self._bindings.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.pthrDelay = PROGRESS_DELAY_US
        self._nixl: _NixlAgent | None = None
        self._closing: AgentClosing | None = None
        self._watched = WATCH.add(WatchedAgent(name=name))
        self._address = regions[0].address if regions else 0
        try:
            self._start(config)
            for region in regions:
                self.register(region)
        except BaseException:
            self.begin_close()
            raise

    def _start(self, config: _Config) -> None:
        with self._translating_errors("start an agent"), found_threads() as threads:
            self._nixl = self._bindings.nixlAgent(self._name, config)
            self._backends = [self._nixl.createBackend(BACKEND, {})]
        self._watched.threads = tuple(threads)

    def register(self, region: Memory) -> None:
        """Register a memory region, which peers may then read and into which reads may write.
        Metadata returned earlier does not contain the region.

        GPU memory is refused where UCX has no transport for it.
        """
        with self._translating_errors("register memory"):
            regions = [(region.address, region.length_bytes, _number_of(region.device), "")]
            self._open().registerMem(
                self._bindings.nixlRegDList(self._kind_of(region.device), regions), self._backends
            )

    def metadata(self) -> bytes:
        """Return the metadata with which peers read from this agent: NIXL's own, the address of
        readable memory, and a digest of both and of the agent's name.
        """
        with self._translating_errors("return its metadata"):
            signed = self._open().getLocalMD() + ADDRESS.pack(self._address)
        return signed + _digest(self._name, signed)

    def add_peer(self, metadata: bytes) -> str:
        """Load a peer's metadata, so that its memory can be read; return the peer's name. The
        metadata must have passed `check_metadata`.
        """
        with self._translating_errors("load a peer's metadata"):
            return self._open().loadRemoteMD(metadata[: -DIGEST_BYTES - ADDRESS.size]).decode()

    def start_read(self, peer: str, spans: Sequence[Span]) -> int:
        """Begin to copy spans of a peer's memory, all on one device, to local memory; return the
        handle for `is_done`.
        """
        handle = self.prepare_read(peer, spans)
        self.post_read(handle)
        return handle

    def prepare_read(self, peer: str, spans: Sequence[Span]) -> int:
        """Prepare a read for `post_read`; nothing is read yet. Return its handle."""
        with self._translating_errors(f"prepare a read from {peer}"):
            local = self._descriptors(
                [(span.local_address, span.length_bytes) for span in spans], spans[0].local_device
            )
            remote = self._descriptors(
                [(span.remote_address, span.length_bytes) for span in spans], spans[0].remote_device
            )
            return self._open().createXferReq(
                self._bindings.NIXL_READ, local, remote, peer, b"", self._backends
            )

    def post_read(self, handle: int) -> None:
        """Begin a prepared read. If this raises, a part of it may have begun."""
        with self._translating_errors("start a read"):
            self._open().postXferReq(handle, b"")

    def is_done(self, handle: int) -> bool:
        with self._translating_errors("finish a read"):
            return self._open().getXferStatus(handle) == self._bindings.NIXL_SUCCESS

    def release(self, handle: int) -> None:
        """Forget a finished read. Releasing a read in progress would not stop it."""
        self._watched.num_ended += 1
        with self._translating_errors("release a read"):
            self._open().releaseXferReq(handle)

    def begin_close(
        self, before: Callable[[], None] | None = None, keep: object = None
    ) -> AgentClosing:
        """Begin to close the agent with every read in progress, without waiting; return the close,
        on which callers can wait. Only `before` may use the agent from now on. Further calls return
        the same close.

        `before`: called first, on the thread that closes. `keep`: object that owns memory into
        which the agent reads; it is kept until the agent has closed.
        """
        if self._closing is None:
            self._closing = AgentClosing(self._name, lambda: self._close(before, keep))
            self._watched.closing = self._closing
        return self._closing

    def close(self) -> bool:
        """Close the agent; return False, after a warning in the log, if it has not closed within
        `closing.CLOSE_S`.
        """
        return self.begin_close().wait(closing.CLOSE_S)

    def _close(self, before: Callable[[], None] | None, _kept: object) -> None:
        if before is not None:
            before()
        nixl, self._nixl = self._nixl, None
        if nixl is not None:
            destroy(nixl, self._bindings)
        del nixl
        WATCH.remove(self._watched)

    def _open(self) -> _NixlAgent:
        if self._nixl is None:
            raise TransferError("the NIXL agent is closed")
        return self._nixl

    def _descriptors(self, spans: list[tuple[int, int]], device: int | None) -> object:
        number = _number_of(device)
        return self._bindings.nixlXferDList(
            self._kind_of(device), [(address, length, number) for address, length in spans]
        )

    def _kind_of(self, device: int | None) -> object:
        return self._bindings.DRAM_SEG if device is None else self._bindings.VRAM_SEG

    @contextmanager
    def _translating_errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise TransferError(
                f"NIXL could not {doing}: {error or type(error).__name__}"
            ) from error


def _number_of(device: int | None) -> int:
    return HOST_DEVICE if device is None else device
