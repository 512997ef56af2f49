"""Limit of connections by file descriptors, whose soft limit is raised to the hard limit."""

import logging
import os
import resource
from pathlib import Path

from fleet.config.schema import WebConfig

log = logging.getLogger("fleet.web")

RESERVED = 128
"""File descriptors that are not available for connections: Redis, served files, sockets that are
being accepted.
"""
UNLIMITED = 1024 * 1024
"""Soft limit of file descriptors to set if there is no hard limit."""
OPEN_NOW = Path("/proc/self/fd")


def connection_bound(web: WebConfig) -> int:
    """Return the number of connections to allow: `web.max_connections`, or fewer if the process may
    open too few files. Logs the result.
    """
    limit = _raise_limit()
    room = max(1, limit - RESERVED - _num_open())
    bound = min(web.max_connections, room)
    if bound < web.max_connections:
        log.warning(
            "at most %d connections are served, not web.max_connections=%d: this process may "
            "open %d files; raise its hard limit "
            "(ulimit -Hn, LimitNOFILE= of systemd)",
            bound,
            web.max_connections,
            limit,
        )
    else:
        log.info(
            "at most %d connections are served (web.max_connections); this process may open %d "
            "files",
            bound,
            limit,
        )
    return bound


def _raise_limit() -> int:
    """Raise the soft limit of file descriptors to the hard limit; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = UNLIMITED if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return min(wanted, UNLIMITED) if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        log.warning("the limit of open files stays at %d: %s", soft, error)
        return soft
    return wanted


def _num_open() -> int:
    return len(os.listdir(OPEN_NOW)) if OPEN_NOW.is_dir() else 0
