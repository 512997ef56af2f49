"""Servers that refuse scripts with undeclared keys, as Fleet's are: they compute the names of keys.
Knows no script.
"""

from redis import Redis
from redis.exceptions import MovedError, NoPermissionError, ResponseError

from fleet.control import keys

UNDECLARED_FLAG = "--!df flags=allow-undeclared-keys\n"
"""Dragonfly's flag for such scripts; a comment for other servers. Every script begins with it."""
PROBE = f"{UNDECLARED_FLAG}return redis.call('EXISTS', '{keys.PREFIX}undeclared')"
REMEDIES = {
    "undeclared key": "start Dragonfly with --default_lua_flags=allow-undeclared-keys",
    "bad lua script": "set script_check_enable to 0 on Tair, or use an instance with cluster "
    "architecture disabled",
}
"""Part of the error reply, in lower case, and the remedy."""


def find_script_refusal(client: Redis) -> str:
    """Return why the server does not run such scripts, and the remedy; "" if it does. Raises: redis
    errors of the connection.
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
    """Return the cause and the remedy for a reply to a script, "" if the reply has another
    cause.
    """
    text = message.casefold()
    remedy = next((remedy for part, remedy in REMEDIES.items() if part in text), "")
    return (
        remedy
        and f"REDIS_URL: this Redis refuses scripts with undeclared keys ({message}): {remedy}"
    )
