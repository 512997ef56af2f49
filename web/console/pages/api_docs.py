"""GET /docs: the OpenAPI document in Swagger UI. Knows no route of the API."""

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from web.console.templating import Templates
from web.http.guard import csrf_of
from web.http.middleware import CONTENT_POLICY

DOCS_POLICY = f"{CONTENT_POLICY}; img-src 'self' data:"
"""Content-Security-Policy of the API's documentation. Images may be data URLs, which hold the icons
in Swagger UI's style sheet; otherwise the policy of every page applies.
"""


class ApiDocsPage:
    def __init__(self, templates: Templates) -> None:
        self._templates = templates

    async def show(self, request: Request) -> Response:
        html = self._templates.render("docs.html", csrf=csrf_of(request.scope))
        return HTMLResponse(
            html, headers={"cache-control": "no-store", "content-security-policy": DOCS_POLICY}
        )
