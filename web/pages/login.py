"""The page where a browser trades the API key for a cookie that stands for it, and the way out. Knows no other page."""

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from web.gateway import Gateway
from web.guard import COOKIE, LOGIN, cookie_value, same_key
from web.pages.views import Views

NO_STORE = {"cache-control": "no-store"}


class Login:
    def __init__(self, gateway: Gateway, api_key: str | None, views: Views) -> None:
        self._gateway = gateway
        self._api_key = api_key
        self._views = views

    async def enter(self, request: Request) -> Response:
        if self._api_key is None:
            return RedirectResponse("/", status_code=303)
        wanted = local_path(request.query_params.get("next", ""))
        wrong = False
        if request.method == "POST":
            async with request.form(max_fields=4, max_files=0) as form:
                given = form.get("key")
            if isinstance(given, str) and same_key(given.strip().encode(), self._api_key):
                return self._let_in(request, self._api_key, wanted)
            wrong = True
        html = self._views.render("login.html", model=self._gateway.model, wrong=wrong, next=wanted)
        return HTMLResponse(html, status_code=401 if wrong else 200, headers=NO_STORE)

    async def leave(self, _request: Request) -> Response:
        answer = RedirectResponse(LOGIN, status_code=303)
        answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
        return answer

    @staticmethod
    def _let_in(request: Request, api_key: str, wanted: str) -> Response:
        answer = RedirectResponse(wanted or "/", status_code=303)
        secure = request.url.scheme == "https"
        answer.set_cookie(COOKIE, cookie_value(api_key), httponly=True, samesite="strict", secure=secure)
        return answer


def local_path(given: str) -> str:
    """`given` if it is a path of this gateway, else "": nobody is sent to another site."""
    local = given.startswith("/") and not given.startswith(("//", "/\\")) and given.isprintable()
    return given if local else ""
