"""Servers that refuse scripts with undeclared keys, as Fleet's are: they compute the names of keys from data. Knows no script."""

import redis
from redis.exceptions import NoPermissionError, ResponseError

from fleet.control import keys

UNDECLARED_FLAG = "--!df flags=allow-undeclared-keys\n"
"""Dragonfly's flag for such scripts; a comment for other servers. Every script begins with it."""
UNUSED_KEY = f"{keys.PREFIX}none"
"""A key that never exists between two calls."""
PROBE = f"{UNDECLARED_FLAG}return redis.call('EXISTS', '{UNUSED_KEY}')"
REMEDIES = {
    "undeclared key": "start Dragonfly with --default_lua_flags=allow-undeclared-keys",
    "bad lua script": "set script_check_enable to 0 on Tair, or use an instance with cluster architecture disabled",
    "number of keys can't be negative or zero": "use an instance with cluster architecture disabled",
    "do not hash to the same slot": "use a server with cluster mode disabled",
    "crossslot": "use a server with cluster mode disabled",
}
"""Part of the error reply, in lower case, and the remedy."""


def find_script_refusal(client: redis.Redis) -> str:
    """Return why the server does not run such scripts, and the remedy; "" if it does. Raises: redis errors of the connection."""
    try:
        client.eval(PROBE, 0)
    except NoPermissionError:
        return ""  # a matter of the user's rights
    except ResponseError as error:
        return explain_script_refusal(str(error))
    return ""


def explain_script_refusal(message: str) -> str:
    """Return the cause and the remedy for a reply to a script, "" if the reply has another cause."""
    text = message.casefold()
    remedy = next((remedy for part, remedy in REMEDIES.items() if part in text), "")
    return remedy and f"REDIS_URL: this Redis refuses scripts with undeclared keys ({message}): {remedy}"
