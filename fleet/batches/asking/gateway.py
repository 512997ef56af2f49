"""Sends the lines of a batch to a gateway, in the background, until each has an answer that another
try would not change. Knows no file.
"""

import asyncio
import base64
import random
import secrets
import ssl
from dataclasses import dataclass
from typing import Self

import httpx2
import msgspec

from fleet.batches.asking.answers import AnsweredLine, LineError, LineResponse
from fleet.batches.lines import BatchLine
from fleet.config.api_keys import ACTING_FOR_HEADER
from fleet.core.errors import ConfigError

BACKGROUND_HEADERS = {"content-type": "application/json", "x-fleet-priority": "background"}
CONNECT_S, READ_S = 10.0, 600.0
MAX_TRIES = 3
"""Number of tries of a line whose failures the line itself may cause, such as a lost worker."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
WAITING = (429, 502, 503, 504)
"""Statuses that mean that the gateway is full or unreachable. A line with such a response is sent
again later, without limit, unless the error code is in `OWN_FAULTS`.
"""
RETRIED = (*WAITING, 500)
OWN_FAULTS = ("worker_lost", "out_of_memory")
"""Codes of 503 errors that a line may cause itself."""
JSON = "application/json"


class SpokenBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a response that was an audio file. `audio`: the file in base64."""

    content_type: str
    audio: str


class _ErrorCode(msgspec.Struct, frozen=True):
    code: str | None = None
    message: str = ""


class _ErrorEnvelope(msgspec.Struct, frozen=True):
    error: _ErrorCode


_decode_error = msgspec.json.Decoder(_ErrorEnvelope).decode


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Outcome of one try. `answer`: line to write if no other try follows; None if the line waits
    for the gateway. `trouble`: reason for another try; "" if no other try should follow. `pause_s`:
    pause that the gateway asks for; None if the gateway asks for none.
    """

    answer: AnsweredLine | None = None
    trouble: str = ""
    pause_s: float | None = None


class LineGateway:
    """Connection to the gateway at `url`, an async context manager. `acting_for`: name of the API
    key for which requests are sent, which requires an `api_key` with the scope `operate`; "" sends
    them for `api_key` itself. `trouble`: reason why the last try must be repeated; "" if it
    succeeded.
    """

    def __init__(self, url: str, api_key: str | None, acting_for: str = "") -> None:
        key = {"authorization": f"Bearer {api_key}"} if api_key else {}
        if acting_for:
            key[ACTING_FOR_HEADER] = acting_for
        self._url = url
        self._http = httpx2.AsyncClient(
            base_url=url,
            headers={**BACKGROUND_HEADERS, **key},
            timeout=httpx2.Timeout(READ_S, connect=CONNECT_S),
            limits=httpx2.Limits(max_connections=None),
            verify=ssl.create_default_context(),
            trust_env=False,
        )
        self.trouble = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(self, line: BatchLine) -> AnsweredLine:
        """Send a line until it has an answer, or has failed `MAX_TRIES` times. While the gateway is
        away or full, the line waits without limit. Raises: ConfigError if the gateway refuses the
        API key, or refuses to let it act for another key.
        """
        num_failures = num_pauses = 0
        while True:
            outcome = await self._try(line)
            self.trouble = outcome.trouble
            num_failures += outcome.answer is not None
            if outcome.answer is not None and (not self.trouble or num_failures == MAX_TRIES):
                return outcome.answer
            pause_s = _pause_s(num_pauses) if outcome.pause_s is None else outcome.pause_s
            await asyncio.sleep(pause_s)
            num_pauses += 1

    async def _try(self, line: BatchLine) -> _Outcome:
        try:
            answer = await self._http.post(line.url, content=bytes(line.body))
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            return _Outcome(trouble=f"nothing answers at {self._url} ({error})")
        except httpx2.TransportError as error:
            is_late = isinstance(error, httpx2.TimeoutException)
            code = "request_timeout" if is_late else "connection_lost"
            trouble = f"the connection broke ({str(error) or type(error).__name__})"
            return _Outcome(unanswered(line, code, f"{trouble}, {MAX_TRIES} times"), trouble)
        self._check_key(answer)
        status = answer.status_code
        trouble = f"the gateway answered {status}" if status in RETRIED else ""
        if _is_waiting(answer):
            return _Outcome(trouble=trouble, pause_s=_retry_after_s(answer))
        return _Outcome(_answered(line, answer), trouble)

    def _check_key(self, answer: httpx2.Response) -> None:
        if answer.status_code in (401, 403):
            raise ConfigError(
                f"FLEET_API_KEY: the gateway at {self._url} answers {answer.status_code} "
                f"({_message_of(answer)}); set the key that it requires",
                param="FLEET_API_KEY",
            )


def unanswered(line: BatchLine, code: str, message: str) -> AnsweredLine:
    """Return the line of an error file for a line without an answer."""
    return AnsweredLine(
        id=_new_id(), custom_id=line.custom_id, error=LineError(code=code, message=message)
    )


def _answered(line: BatchLine, answer: httpx2.Response) -> AnsweredLine:
    response = LineResponse(
        status_code=answer.status_code,
        request_id=answer.headers.get("x-request-id", ""),
        body=msgspec.Raw(_body_of(answer)),
    )
    return AnsweredLine(id=_new_id(), custom_id=line.custom_id, response=response)


def _body_of(answer: httpx2.Response) -> bytes:
    """Return the body of a response as JSON on one line: as it is, an audio file in base64, or any
    other text as a string.
    """
    kind = answer.headers.get("content-type", "").partition(";")[0]
    if kind == JSON:
        try:
            return msgspec.json.encode(msgspec.json.decode(answer.content))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return msgspec.json.encode(answer.text)
    if kind.startswith("audio/"):
        audio = base64.b64encode(answer.content).decode("ascii")
        return msgspec.json.encode(SpokenBody(content_type=kind, audio=audio))
    return msgspec.json.encode(answer.text)


def _is_waiting(answer: httpx2.Response) -> bool:
    if answer.status_code not in WAITING:
        return False
    try:
        return _decode_error(answer.content).error.code not in OWN_FAULTS
    except (msgspec.DecodeError, UnicodeDecodeError):
        return True


def _message_of(answer: httpx2.Response) -> str:
    try:
        return _decode_error(answer.content).error.message
    except (msgspec.DecodeError, UnicodeDecodeError):
        return answer.reason_phrase


def _retry_after_s(answer: httpx2.Response) -> float | None:
    """Return the seconds that a response's Retry-After header asks for, at most 60; None if there
    is no such header, or if it is a date.
    """
    header = answer.headers.get("retry-after", "")
    return min(float(header), MAX_PAUSE_S * 2) if header.isdecimal() else None


def _pause_s(num_pauses: int) -> float:
    """Return the seconds until the next try. The pause grows with `num_pauses` and is random, so
    that lines do not try again at the same time.
    """
    return min(FIRST_PAUSE_S * 2 ** min(num_pauses, 10), MAX_PAUSE_S) * random.uniform(0.5, 1)


def _new_id() -> str:
    return f"batch_req_{secrets.token_hex(16)}"
