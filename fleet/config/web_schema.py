"""Sections of a deployment file about the gateway: HTTP, and voice sessions."""

from typing import Annotated, Literal

from fleet.config.fields import Folder, Host, Items, Network, Origin, Port, Strict, Switch, Text
from fleet.config.values import Number, Whole

MODEL_ALIASES = (
    "tts-1",
    "tts-1-hd",
    "gpt-4o-mini-tts",
    "whisper-1",
    "gpt-transcribe",
    "gpt-4o-transcribe",
    "gpt-4o-mini-transcribe",
    "gpt-realtime",
    "gpt-realtime-mini",
    "gpt-realtime-1.5",
    "gpt-realtime-2",
    "gpt-realtime-2.1",
    "gpt-realtime-2.1-mini",
    "gpt-4o-realtime-preview",
    "gpt-4o-mini-realtime-preview",
)
"""Default model names of clients of the audio and Realtime APIs. Chat models are not among them;
see `web.model_name`.
"""


class WebConfig(Strict):
    """The gateway. `tls_cert` and `tls_key` are PEM files, set together; `tls` creates a
    certificate in the data folder instead.

    `allowed_hosts`: names by which browsers may address this gateway beside its own; see
    `web/http/hosts.py`.
    `allowed_origins`: origins whose pages may call the API from a browser; see
    `web/http/origins.py`.
    `trusted_proxies`: peers whose X-Forwarded-For and X-Forwarded-Proto are believed.
    `model_aliases`: other names under which the model answers; `/v1/models` lists it under its own
    name only.
    `max_leading_silence_ms`: the longest silence before the first voiced sample of a spoken answer;
    None: unlimited. `header_timeout_s`, `body_timeout_s`, `send_timeout_s`: time for a whole
    request head, for the next part of a body, and for a client that does not read, before its
    connection is closed. `body_memory_mib`: request bodies held in memory at one time, and as much
    again for unfinished WebSocket messages.
    `open_metrics`: `/metrics` is served without the API key although one is set.
    """

    host: Host = "127.0.0.1"
    port: Port = 8000
    allowed_hosts: tuple[Host, ...] = ()
    allowed_origins: tuple[Origin, ...] = ()
    trusted_proxies: tuple[Network, ...] = ()
    model_name: Text | None = None
    model_aliases: tuple[Text, ...] = MODEL_ALIASES
    max_leading_silence_ms: Annotated[int, Whole(0, 60_000)] | None = 60
    read_only: Switch = False
    open_metrics: Switch = False
    max_connections: Annotated[int, Whole(1, 1_000_000)] = 4096
    max_connections_per_address: Annotated[int, Whole(1, 1_000_000)] = 1024
    header_timeout_s: Annotated[float, Number(0.1, 3600)] = 10.0
    body_timeout_s: Annotated[float, Number(0.1, 3600)] = 30.0
    send_timeout_s: Annotated[float, Number(0.1, 3600)] = 30.0
    body_memory_mib: Annotated[int, Whole(1, 1024 * 1024)] = 128
    tls: Literal["self-signed"] | None = None
    tls_cert: Folder | None = None
    tls_key: Folder | None = None

    @property
    def scheme(self) -> str:
        return "https" if self.tls is not None or self.tls_cert is not None else "http"


class VoiceConfig(Strict):
    """Voice sessions of one gateway. Beyond `max_sessions`, up to `max_waiting` clients wait in a
    queue; others are refused.

    `send_ahead_s`: how far ahead of playback audio is sent. `reconnect_timeout_s`: how long a
    session waits for a client whose connection was lost. `speculate_ms`: the silence after which a
    response is started early, to be discarded if speech continues; 0: never. `max_session_s`: the
    longest duration of a session. `idle_s`: a session ends after this time without input from its
    client and without a response. `sessions_per_secret`: sessions that one short-lived secret
    (`ek_...`) may have open or queued at one time, on all gateways together. `secret_share`: the
    share of `max_sessions` and `max_waiting` open to short-lived secrets; the rest is reserved for
    the API key and the console.
    """

    max_sessions: Items = 64
    max_waiting: Annotated[int, Whole(0, 100_000)] = 64
    send_ahead_s: Annotated[float, Number(0.1, 3600)] = 1.0
    reconnect_timeout_s: Annotated[float, Number(0.1, 3600)] = 60.0
    speculate_ms: Annotated[int, Whole(0, 10_000)] = 200
    max_session_s: Annotated[float, Number(1, 86_400)] = 3600.0
    idle_s: Annotated[float, Number(1, 86_400)] = 900.0
    sessions_per_secret: Annotated[int, Whole(1, 1_000_000)] = 1
    secret_share: Annotated[float, Number(0, 1, above=True)] = 0.75
