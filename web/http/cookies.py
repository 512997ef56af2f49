"""Reading one cookie. Knows no cookie of this server.

The standard library's parser is not used: the time it takes for a quoted value grows with the square of its length, up to Python
3.12.5, and clients without a key send cookies too.
"""


def cookie_of(header: str, name: str) -> str:
    """The value of the first cookie of this name in a Cookie header, without quotes; "" where there is none."""
    for pair in header.split(";"):
        key, _, value = pair.partition("=")
        if key.strip() == name:
            return value.strip().strip('"')
    return ""
