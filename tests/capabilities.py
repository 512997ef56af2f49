"""Access to optional capabilities of an engine that a test knows to be present."""

from fleet.engine.base import Engine
from fleet.engine.capabilities import (
    CachedPrefixes,
    KVPagePool,
    KVTransfer,
    RemotePasses,
    SessionCopying,
)


def kv_of(engine: Engine) -> KVTransfer:
    assert engine.kv is not None, "an engine without hand-offs"
    return engine.kv


def pages_of(engine: Engine) -> KVPagePool:
    pages = kv_of(engine).pages
    assert pages is not None, "an engine without shared pages"
    return pages


def prefixes_of(engine: Engine) -> CachedPrefixes:
    assert engine.prefixes is not None, "an engine without a prefix cache"
    return engine.prefixes


def sessions_of(engine: Engine) -> SessionCopying:
    assert engine.sessions is not None, "an engine without copies of sessions"
    return engine.sessions


def remote_of(engine: Engine) -> RemotePasses:
    assert engine.remote is not None, "an engine with all layers"
    return engine.remote
