"""Connections to a worker's session service (saving and loading of conversations): each is answered
or closed.
"""

import pytest

from fleet.core.errors import BadInput
from fleet.core.ids import StageName, WorkerId
from fleet.core.session_messages import (
    PURPOSE,
    SaveSession,
    SessionEnd,
    decode_session_message,
    encode_session_message,
)
from fleet.core.session_parts import SessionLayout, SessionLimits
from fleet.engine.capabilities import SavedSession
from fleet.spans.net.connection import ConnectionClosed, FrameReceived, SpanArrivals, SpanConnection
from fleet.spans.net.dial import dial
from fleet.worker.process.endpoints import endpoint_of
from fleet.worker.sessions import service as session_service
from fleet.worker.sessions.service import SessionService
from tests.support import wait_until

WAIT_S = 20.0


class NoCachedSessions:
    """Double of an engine's session copies that caches no rows."""

    limits = SessionLimits(
        layout=SessionLayout.parse("float32, 1 heads of 1"), num_layers=1, max_rows=1
    )

    def begin_save(self, session: str) -> None:
        raise BadInput(f"no rows of the session {session} are cached")

    def begin_load(self, session: str, saved: SavedSession) -> None:
        raise AssertionError("nothing is loaded")

    def take_copied(self) -> tuple[()]:
        return ()


def service() -> SessionService:
    return SessionService(
        NoCachedSessions(), StageName("lm"), "c", "127.0.0.1", WorkerId("w"), None, lambda _: None
    )


def asked(service: SessionService) -> tuple[SpanConnection, SpanArrivals]:
    """Connect to a session service, and send a command to save."""
    connection, arrivals = connected(service)
    connection.send(encode_session_message(SaveSession(session="s")))
    return connection, arrivals


def connected(service: SessionService) -> tuple[SpanConnection, SpanArrivals]:
    fields = {
        name: value.encode() if isinstance(value, str) else value
        for name, value in service.fields.items()
    }
    endpoint, arrivals = endpoint_of("session", fields, None), SpanArrivals()
    assert endpoint is not None
    connection = dial(
        endpoint.address,
        key=endpoint.key,
        own_name="client",
        purpose=PURPOSE,
        arrivals=arrivals,
        timeout_s=WAIT_S,
    )
    return connection, arrivals


def test_refused_save_is_answered_with_the_code_of_its_error() -> None:
    served = service()
    connection, arrivals = asked(served)

    def answer() -> FrameReceived | None:
        served.advance()
        return next((each for each in arrivals.take(0) if isinstance(each, FrameReceived)), None)

    received = wait_until(answer, "an answer")
    assert received is not None
    refused = SessionEnd(
        session="s", error="no rows of the session s are cached", code="invalid_value"
    )
    assert decode_session_message(received.frame.header) == refused
    connection.close()
    served.close()


@pytest.mark.parametrize("is_answered", [False, True])
def test_connection_of_a_silent_client_is_closed(
    monkeypatch: pytest.MonkeyPatch, is_answered: bool
) -> None:
    """A connection is closed when its client, whose turn it is, has sent nothing for long."""
    served = service()
    connection, arrivals = asked(served) if is_answered else connected(served)
    if is_answered:
        wait_until(lambda: served.advance() or arrivals.take(0), "an answer")
    monkeypatch.setattr(session_service, "SILENT_S", 0.0)
    wait_until(lambda: served.advance() or connection.is_closed, "the connection to be closed")
    connection.close()
    served.close()


def test_service_that_closes_ends_connections_that_it_has_not_handled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A service that closes also ends the connections that it has not handled: a frozen worker may
    accept one between the loss of its lease and its next incarnation.
    """
    of_service = SpanArrivals()
    monkeypatch.setattr(session_service, "SpanArrivals", lambda **_: of_service)
    served = service()
    _, arrivals = asked(served)
    wait_until(lambda: of_service.num_bytes[0], "the order to arrive")
    served.close()
    assert any(isinstance(each, ConnectionClosed) for each in arrivals.take(WAIT_S))
