"""The page where a browser trades the API key for a login, and the way out. Knows no other page."""

from http import HTTPStatus
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from web.console.templating import Templates
from web.gateway.gateway import Gateway
from web.http.body import read_body
from web.http.errors import Unauthorized, status_of
from web.http.guard import LOGIN_PATH, SECURE_COOKIE, cookie_name, keys_equal, login_token
from web.http.logins import Logins
from web.http.wrong_keys import WrongKeys

NO_STORE = {"cache-control": "no-store"}
MAX_FORM_BYTES = 8192


class LoginPages:
    def __init__(self, gateway: Gateway, api_key: str | None, logins: Logins, wrong_keys: WrongKeys, views: Templates) -> None:
        self._gateway = gateway
        self._api_key = api_key
        self._logins = logins
        self._wrong_keys = wrong_keys
        self._views = views

    async def log_in(self, request: Request) -> Response:
        if self._api_key is None:
            return RedirectResponse("/", status_code=303)
        wanted = keep_local_path(request.query_params.get("next", ""))
        if request.method != "POST":
            return self._form(wanted)
        given = _key_in(await read_body(request, MAX_FORM_BYTES))
        if not keys_equal(given.encode(), self._api_key):
            return self._refuse(request, given, wanted)
        await self._logins.end(login_token(request.scope))
        answer = RedirectResponse(wanted or "/", status_code=303)
        name = cookie_name(request.scope)
        answer.set_cookie(name, await self._logins.begin(), httponly=True, samesite="strict", secure=name == SECURE_COOKIE)
        return answer

    async def log_out(self, request: Request) -> Response:
        await self._logins.end(login_token(request.scope))
        answer = RedirectResponse(LOGIN_PATH, status_code=303)
        name = cookie_name(request.scope)
        answer.delete_cookie(name, httponly=True, samesite="strict", secure=name == SECURE_COOKIE)
        return answer

    def _refuse(self, request: Request, given: str, wanted: str) -> Response:
        refusal = Unauthorized("That is not this server's key (FLEET_API_KEY).")
        if given:
            refusal = self._wrong_keys.refusal(request.scope, refusal)
        answer = self._form(wanted, refusal.message, status_of(refusal))
        if status_of(refusal) != HTTPStatus.UNAUTHORIZED:
            answer.headers["retry-after"] = str(refusal.retry_after_s)
        return answer

    def _form(self, wanted: str, refused: str = "", status: int = 200) -> Response:
        html = self._views.render("login.html", model=self._gateway.model, refused=refused, next=wanted)
        return HTMLResponse(html, status_code=status, headers=NO_STORE)


def _key_in(form: bytes) -> str:
    """Return the key in a form as a browser sends it; "" where there is none."""
    try:
        fields = parse_qs(form.decode(), max_num_fields=4)
    except ValueError:
        return ""
    return fields.get("key", [""])[0].strip()


def keep_local_path(given: str) -> str:
    """`given` if it is a path of this gateway, else "": nobody is sent to another site."""
    local = given.startswith("/") and not given.startswith(("//", "/\\")) and given.isprintable()
    return given if local else ""
