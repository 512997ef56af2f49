"""Reading a cookie from a Cookie header.

The standard library's parser takes quadratic time for quoted values, up to Python 3.12.5, and
cookies are read before access is checked.
"""


def read_cookie(header: str, name: str) -> str:
    """Return the unquoted value of the first cookie of this name in a Cookie header; "" if there is
    none.
    """
    for pair in header.split(";"):
        key, _, value = pair.partition("=")
        if key.strip() == name:
            return value.strip().strip('"')
    return ""
