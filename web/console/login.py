"""The login page, where a browser exchanges an API key with the scope `watch` for a cookie, and
the logout. Knows no other page.
"""

import logging
from http import HTTPStatus
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from web.console.templating import Templates
from web.gateway.gateway import Gateway
from web.http.body import read_body
from web.http.errors import MissingScope, Unauthorized, status_of
from web.http.guard import LOGIN_PATH, SECURE_COOKIE, cookie_name, login_token
from web.http.key_ring import KeyRing
from web.http.logins import Logins
from web.http.wrong_keys import WrongKeys, address_of

log = logging.getLogger("fleet.web")

NO_STORE = {"cache-control": "no-store"}
MAX_FORM_BYTES = 8192


class LoginPages:
    def __init__(
        self,
        gateway: Gateway,
        keys: KeyRing,
        logins: Logins,
        wrong_keys: WrongKeys,
        templates: Templates,
    ) -> None:
        self._gateway = gateway
        self._keys = keys
        self._logins = logins
        self._wrong_keys = wrong_keys
        self._templates = templates

    async def log_in(self, request: Request) -> Response:
        if not self._keys.is_required:
            return RedirectResponse("/", status_code=303)
        wanted = keep_local_path(request.query_params.get("next", ""))
        if request.method != "POST":
            return self._form(wanted)
        key = _read_key(await read_body(request, MAX_FORM_BYTES))
        caller = self._keys.find(key.encode())
        if caller is None:
            return self._refuse(request, key, wanted)
        if not caller.may("watch"):
            error = MissingScope(f"The key {caller.name!r} does not have the scope watch.")
            return self._form(wanted, error.message, status_of(error))
        await self._logins.end(login_token(request.scope))
        response = RedirectResponse(wanted or "/", status_code=303)
        name = cookie_name(request.scope)
        response.set_cookie(
            name,
            await self._logins.begin(caller.name),
            httponly=True,
            samesite="strict",
            secure=name == SECURE_COOKIE,
        )
        log.info("key %s: logged in to the console from %s", caller.name, address_of(request.scope))
        return response

    async def log_out(self, request: Request) -> Response:
        await self._logins.end(login_token(request.scope))
        response = RedirectResponse(LOGIN_PATH, status_code=303)
        name = cookie_name(request.scope)
        response.delete_cookie(name, httponly=True, samesite="strict", secure=name == SECURE_COOKIE)
        return response

    def _refuse(self, request: Request, key: str, wanted: str) -> Response:
        refusal = Unauthorized("That is not a key of this server.")
        if key:
            refusal = self._wrong_keys.refusal(request.scope, refusal)
        response = self._form(wanted, refusal.message, status_of(refusal))
        if status_of(refusal) != HTTPStatus.UNAUTHORIZED:
            response.headers["retry-after"] = str(refusal.retry_after_s)
        return response

    def _form(self, wanted: str, refused: str = "", status: int = 200) -> Response:
        html = self._templates.render(
            "login.html", model=self._gateway.model, refused=refused, next=wanted
        )
        return HTMLResponse(html, status_code=status, headers=NO_STORE)


def _read_key(form: bytes) -> str:
    """Return the API key in the login form that a browser sent; "" without a key."""
    try:
        fields = parse_qs(form.decode(), max_num_fields=4)
    except ValueError:
        return ""
    return fields.get("key", [""])[0].strip()


def keep_local_path(path: str) -> str:
    """Return `path` if it is a path of this gateway, otherwise "": the redirect after a login must
    not lead to another site.
    """
    local = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if local else ""
