"""Static files of the console. Browsers cache them for a year at an address that contains the
file's hash, and revalidate them at any other address.
"""

from urllib.parse import parse_qs

from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from web.console.templating import STATIC, compute_digest


class HashedStaticFiles(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        digest = parse_qs(scope["query_string"].decode("latin-1")).get("v", [""])[0]
        current = (
            bool(digest) and response.status_code == 200 and digest == compute_digest(STATIC / path)
        )
        response.headers["cache-control"] = (
            "public, max-age=31536000, immutable" if current else "no-cache"
        )
        return response
