"""Check for servers that refuse scripts with undeclared keys. Fleet's scripts compute the names of
keys, and so do not declare them. Knows no script.
"""

from redis import Redis
from redis.exceptions import MovedError, NoPermissionError, ResponseError

from fleet.control import keys

UNDECLARED_FLAG = "--!df flags=allow-undeclared-keys\n"
"""Dragonfly's flag for scripts with undeclared keys; a comment for other servers. Every script
begins with it.
"""
PROBE = f"{UNDECLARED_FLAG}return redis.call('EXISTS', '{keys.PREFIX}undeclared')"
REMEDIES = {
    "undeclared key": "start Dragonfly with --default_lua_flags=allow-undeclared-keys",
    "bad lua script": "set script_check_enable to 0 on Tair, or use an instance with cluster "
    "architecture disabled",
}
"""Remedy for each phrase of an error reply; phrases are in lower case."""


def find_script_refusal(client: Redis) -> str:
    """Return why the server does not run scripts with undeclared keys, and the remedy; "" if it
    runs them. Raises: redis errors of the connection.
    """
    try:
        client.eval(PROBE, *keys.DECLARED)
    except NoPermissionError:
        return ""  # a matter of the user's rights
    except MovedError:
        return (
            "REDIS_URL: this Redis is a node of a cluster, where another owns the fleet's "
            "keys: write redis+cluster://HOST:PORT"
        )
    except ResponseError as error:
        return explain_script_refusal(str(error))
    return ""


def explain_script_refusal(message: str) -> str:
    """Return the cause and the remedy if `message`, the error reply to a script, is about
    undeclared keys; else "".
    """
    text = message.casefold()
    remedy = next((remedy for part, remedy in REMEDIES.items() if part in text), "")
    return (
        remedy
        and f"REDIS_URL: this Redis refuses scripts with undeclared keys ({message}): {remedy}"
    )
