"""Advice in the refusal of an unknown path: what to use instead, or how to correct the client's
base URL.
"""

from fleet.core.errors import SHOWN_CHARS, UnsupportedValue

_CHAT = "POST /v1/chat/completions"
_ROUTES = {
    "responses": "of the Responses API this server has POST /v1/responses, and GET, DELETE and "
    "input_items of a stored response",
    "conversations": "conversations have no routes of their own; continue one at /v1/responses by "
    "previous_response_id",
    "messages": f"Anthropic's Messages API is not served; use {_CHAT} (in the client: choose an "
    "OpenAI-compatible provider)",
    "embeddings": "this model has no embeddings; choose another server for them in the client's "
    "document settings",
    "images": "this model does not generate images; turn image generation off in the client, or "
    "choose another server for it",
    "videos": "this model does not generate video; choose another server for it",
    "moderations": "moderation is not served; turn moderation off in the client",
    "uploads": "files are not uploaded in parts; send a file for a batch to POST /v1/files, audio "
    "as content parts of type input_audio, and text in messages",
    "assistants": f"the Assistants API is not served; use {_CHAT}",
    "threads": f"the Assistants API is not served; use {_CHAT}",
    "vector_stores": "there is no search or storage here; send the text in messages",
    "fine_tuning": "models are not trained through this API",
    "realtime/calls": "SIP is not served, and calls are not renegotiated; make a new call over "
    "WebRTC at POST /v1/realtime/calls, with ?session=SESSION to continue a session",
    "realtime/sessions": "the beta dialect is not served; get a short-lived key at POST "
    "/v1/realtime/client_secrets",
    "realtime/transcription_sessions": "the beta dialect is not served; use POST "
    "/v1/audio/transcriptions",
    "realtime/translations": "translations are not served; /v1/audio/transcriptions transcribes "
    "speech in its own language",
    "chat/completions": f"answers are not stored under their ids; use {_CHAT}",
}
"""Advice for each route of OpenAI's API that is not served, by its path without /v1/; also for the
routes below that path.
"""
_SERVED = (
    "this server has /v1/chat/completions, /v1/responses, /v1/decisions, /v1/completions, "
    "/v1/audio/speech, /v1/audio/transcriptions, /v1/realtime (a WebSocket) and /v1/models; "
    "GET /openapi.json lists everything"
)
_OF_OLLAMA = frozenset(
    {
        "blobs",
        "chat",
        "copy",
        "create",
        "delete",
        "embed",
        "embeddings",
        "generate",
        "ps",
        "pull",
        "push",
        "show",
        "tags",
    }
    | {"version"}
)
"""First path segments of Ollama's routes below /api/."""
_ENDPOINTS = (["chat", "completions"], ["audio", "speech"], ["audio", "transcriptions"])
"""Path segments of routes that mark, in any URL, the end of the API's base path."""
_FIRST_PIECES = frozenset(
    {
        "audio",
        "batches",
        "completions",
        "files",
        "models",
        "realtime",
        *(route.partition("/")[0] for route in _ROUTES),
    }
)
_PREFIXES = frozenset({"v1", "api", "openai"})
_AZURE_PREFIXES = frozenset({"deployments", "engines"})
"""Path segments of Azure's API after which the name of a deployment follows."""


def advice_for_path(path: str) -> tuple[str, str]:
    """Return the error code and the advice for a path without a route; the advice may be ""."""
    pieces = [piece for piece in path.split("/") if piece]
    if (
        pieces[:1] == ["api"]
        and pieces[1:2]
        and pieces[1] in _OF_OLLAMA
        and pieces[1:3] not in _ENDPOINTS
    ):
        advice = (
            "Ollama's API is not served; add this server as an OpenAI connection, with a "
            "base URL that ends in /v1"
        )
        return UnsupportedValue.code, advice
    if pieces[:2] == ["v1", "v1"]:
        return "not_found", "the client's base URL has /v1 twice; remove one"
    if pieces == ["v1"]:
        return "not_found", f"this is the base URL of the API, not a route; {_SERVED}"
    start = _api_start(pieces)
    if start is not None and pieces[:start] != ["v1"]:
        return (
            "not_found",
            f"the API is under /v1; let the client's base URL be {_base_for(pieces[start:])}",
        )
    if pieces[:1] != ["v1"]:
        return "not_found", ""
    routes = ("/".join(pieces[1:3]), pieces[1])
    advice = next((_ROUTES[route] for route in routes if route in _ROUTES), "")
    if advice and pieces[1:] not in _ENDPOINTS:
        return UnsupportedValue.code, advice
    if "//" in path:
        return (
            "not_found",
            f"the client's base URL ends in a slash; let it be {_base_for(pieces[1:])}",
        )
    return "not_found", _SERVED


def _base_for(route: list[str]) -> str:
    return f"http://HOST:PORT/v1, for /v1/{'/'.join(route)[:SHOWN_CHARS]}"


def _api_start(pieces: list[str]) -> int | None:
    """Return the index of the path segment at which a path of the API begins, without /v1; None if
    the path contains no route of the API.
    """
    for at in reversed(range(len(pieces) - 1)):
        if pieces[at : at + 2] in _ENDPOINTS:
            # the base URL is the address of an endpoint, and a route follows
            return at + 2 if pieces[at + 2 :] and pieces[at + 2] in _FIRST_PIECES else at
    for at, piece in enumerate(pieces):
        is_below = (
            at == 0 or pieces[at - 1] in _PREFIXES or (at > 1 and pieces[at - 2] in _AZURE_PREFIXES)
        )
        if piece in _FIRST_PIECES and is_below:
            return at
    return None
