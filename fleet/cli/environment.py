"""The secrets in a command's environment: every process of a fleet has only those that it uses.

A flaw in a worker's transport may show its memory to others, and what a process was started with stays in its memory, and in
`/proc/PID/environ`, for as long as it runs. Imports nothing heavy, since commands that have too much start again.
"""

import os
import re
import sys
from collections.abc import Mapping

API_KEY, REDIS_URL = "FLEET_API_KEY", "REDIS_URL"
HUB_TOKENS = frozenset({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})
PROXIES = frozenset(name for proxy in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY") for name in (proxy, proxy.lower()))
"""Both are needed to download a checkpoint, which `fleet up` does itself before it starts the others."""
USES = {
    "redis": frozenset({REDIS_URL}),
    "conductor": frozenset({REDIS_URL}),
    "worker": frozenset({REDIS_URL}),
    "web": frozenset({API_KEY, REDIS_URL}),
    "jobs": frozenset({API_KEY, REDIS_URL}),
}
"""Command -> the secrets it uses. Jobs call the gateway."""
_SECRET_NAME = re.compile(
    r".*(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS|API_?KEY|(ACCESS|SECRET|PRIVATE|ENCRYPTION|SIGNING|AUTH)_?KEY"
    r"|._PWD|_PAT|CLI_AUTH|OPENAI_KEY)",
    re.IGNORECASE,
)
_PASSWORD_IN_ADDRESS = re.compile(r"[^/]*://[^/@]*:[^/@]+@.*", re.DOTALL)


def is_secret(name: str, value: str) -> bool:
    """Return True for a variable that is called a secret, and for an address with a password."""
    if name == REDIS_URL or _SECRET_NAME.fullmatch(name):
        return True
    return _PASSWORD_IN_ADDRESS.fullmatch(value) is not None


def without_secrets(env: Mapping[str, str], used: frozenset[str]) -> dict[str, str]:
    """Return the variables but for secrets that are not `used`."""
    return {name: value for name, value in env.items() if name in used or not is_secret(name, value)}


def start_again_without_secrets(arguments: list[str]) -> None:
    """Become the same command with fewer variables, if it is one that holds tensors or decisions and has a secret to spare.

    `arguments`: those of `fleet`. A variable that is only unset stays in the memory of the process.
    """
    command = arguments[0] if arguments else ""
    if command not in ("redis", "conductor", "worker"):
        return
    env = without_secrets(os.environ, USES[command] | (HUB_TOKENS | PROXIES if command == "worker" else frozenset()))
    if len(env) < len(os.environ) and sys.executable:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], env)
