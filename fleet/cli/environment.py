"""Secrets in a command's environment: each process of a fleet gets only the secrets that it uses.

A flaw in a worker's transport may expose its memory, and a process's environment stays in its
memory and in `/proc/PID/environ` while it runs. Imports nothing heavy, since a command with too
many secrets restarts itself.
"""

import os
import re
import sys
from collections.abc import Mapping

API_KEY, REDIS_URL = "FLEET_API_KEY", "REDIS_URL"
USES = {
    "redis": frozenset({REDIS_URL}),
    "conductor": frozenset({REDIS_URL}),
    "worker": frozenset({REDIS_URL}),
    "web": frozenset({API_KEY, REDIS_URL}),
    "jobs": frozenset({API_KEY, REDIS_URL}),
}
"""Secrets that each command uses, by command name. The job worker has the API key, since jobs call
the gateway.
"""
_SECRET_NAME = re.compile(
    r".*(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS|API_?KEY"
    r"|(ACCESS|SECRET|PRIVATE|ENCRYPTION|SIGNING|AUTH)_?KEY|._PWD|_PAT|CLI_AUTH|OPENAI_KEY)",
    re.IGNORECASE,
)
_PASSWORD_IN_ADDRESS = re.compile(r"[^/]*://[^/@]*:[^/@]+@.*", re.DOTALL)


def is_secret(name: str, value: str) -> bool:
    """Return True for a variable whose name is a known secret's, or whose value is an address with
    a password.
    """
    if name == REDIS_URL or _SECRET_NAME.fullmatch(name):
        return True
    return _PASSWORD_IN_ADDRESS.fullmatch(value) is not None


def without_secrets(env: Mapping[str, str], used: frozenset[str]) -> dict[str, str]:
    """Return a copy of `env` without secrets, except the names in `used`."""
    return {
        name: value for name, value in env.items() if name in used or not is_secret(name, value)
    }


def restart_without_secrets(arguments: list[str]) -> None:
    """Replace this process by the same command with a reduced environment, if the command is redis,
    conductor or worker and its environment has secrets that it does not use.

    `arguments`: the arguments of `fleet`. Unsetting a variable is not enough, since its value stays
    in the memory of the process.
    """
    command = arguments[0] if arguments else ""
    if command not in ("redis", "conductor", "worker"):
        return
    env = without_secrets(os.environ, USES[command])
    if len(env) < len(os.environ) and sys.executable:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], env)
