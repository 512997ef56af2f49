"""Sections of a deployment file about the gateway: HTTP, and voice sessions."""

from typing import Annotated, Literal

from fleet.config.fields import (
    Address,
    Endpoint,
    Folder,
    Host,
    Items,
    Network,
    Origin,
    Port,
    ServiceUrl,
    Strict,
    Switch,
    Text,
    Url,
)
from fleet.config.values import Number, Whole

TOOL_FORMATS = Literal[
    "auto", "none", "hermes", "llama3", "mistral", "mistral_args", "pythonic", "json"
]

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
"""Model names that clients of the audio and Realtime APIs send by default, accepted as aliases.
Names of chat models are not included; see `web.model_name`.
"""


class WebConfig(Strict):
    """Settings of the gateway's HTTP server.

    `tls_cert`, `tls_key`: PEM files, set together; `tls`: `self-signed` creates a certificate in
    the data folder instead. `allowed_hosts`: names by which browsers may address this gateway,
    beside `host`; see `web/http/hosts.py`. `allowed_origins`: origins whose pages may call the API
    from a browser; see `web/http/origins.py`. `trusted_proxies`: peers whose X-Forwarded-For and
    X-Forwarded-Proto are believed. `model_aliases`: model names that clients may send instead of
    the model's name; `/v1/models` does not list them. `tool_format`: form in which the model writes
    function calls; `auto` derives it from the chat template, `none` means no function calls.
    `max_leading_silence_ms`: longest silence before the first voiced sample of a spoken answer;
    None: unlimited. `response_retention_s`: how long a response of the Responses API is stored; 0
    stores no response. `max_stored_responses_mib`: memory limit of all stored responses together.

    `header_timeout_s`: time for a whole request head. `body_timeout_s`: time for the next part of a
    body. `send_timeout_s`: time for which a client may read nothing. After a timeout the connection
    is closed. `body_memory_mib`: memory for request bodies held at one time, and as much again for
    unfinished WebSocket messages. `open_metrics`: serve `/metrics` without an API key. `keys_file`:
    file of the API keys that clients may send, with their scopes and limits; see
    `fleet/config/api_keys.py`.
    """

    host: Host = "127.0.0.1"
    port: Port = 8000
    allowed_hosts: tuple[Host, ...] = ()
    allowed_origins: tuple[Origin, ...] = ()
    trusted_proxies: tuple[Network, ...] = ()
    model_name: Text | None = None
    model_aliases: tuple[Text, ...] = MODEL_ALIASES
    tool_format: TOOL_FORMATS = "auto"
    max_leading_silence_ms: Annotated[int, Whole(0, 60_000)] | None = 60
    response_retention_s: Annotated[int, Whole(0, 31_536_000)] = 14_400
    max_stored_responses_mib: Annotated[int, Whole(16, 1024 * 1024)] = 64
    read_only: Switch = False
    open_metrics: Switch = False
    max_connections: Annotated[int, Whole(1, 1_000_000)] = 4096
    max_connections_per_address: Annotated[int, Whole(1, 1_000_000)] = 1024
    header_timeout_s: Annotated[float, Number(0.1, 3600)] = 10.0
    body_timeout_s: Annotated[float, Number(0.1, 3600)] = 30.0
    send_timeout_s: Annotated[float, Number(0.1, 3600)] = 30.0
    body_memory_mib: Annotated[int, Whole(1, 1024 * 1024)] = 128
    keys_file: Folder | None = None
    tls: Literal["self-signed"] | None = None
    tls_cert: Folder | None = None
    tls_key: Folder | None = None

    @property
    def scheme(self) -> str:
        return "https" if self.tls is not None or self.tls_cert is not None else "http"


class BatchConfig(Strict):
    """Settings of files and batches (`/v1/files`, `/v1/batches`).

    `folder`: folder of files and batches, which all gateways and job workers must see; None:
    `batches` in the data folder. `max_file_mib`: size of an uploaded file. `max_files`: stored
    files, outputs of batches included. `max_lines`: lines of one batch. `max_unfinished`: batches
    that have not ended. `concurrency`: lines of a batch that are sent at one time; all but a single
    line wait at the gateway while other requests or voice sessions are live.
    """

    folder: Folder | None = None
    max_file_mib: Annotated[int, Whole(1, 1024)] = 32
    max_files: Annotated[int, Whole(1, 100_000)] = 1000
    max_lines: Annotated[int, Whole(1, 1_000_000)] = 50_000
    max_unfinished: Annotated[int, Whole(1, 10_000)] = 100
    concurrency: Annotated[int, Whole(1, 256)] = 4


class HistoryConfig(Strict):
    """Settings of the history: answers that are kept beyond `retention_s` because they failed, were
    interrupted by a death, were slow, had dropouts or are pinned.

    `folder`: folder of the history's file, which the gateways of a host share; None: `history` in
    the data folder. `max_mib`: size limit of the history; 0 keeps no answer. `days`: number of days
    for which an answer is kept. `sound`: True to keep the audio of the answers too.
    """

    folder: Folder | None = None
    max_mib: Annotated[int, Whole(0, 1024 * 1024)] = 256
    days: Annotated[int, Whole(1, 3650)] = 14
    sound: Switch = False


class AlertConfig(Strict):
    """Settings of the alerts about incidents. Every alert is sent by a single gateway.

    `webhook`: address that receives alerts as JSON by POST; None: no alerts are sent. `console`:
    address of the console for links in alerts; None: host and port of the gateway that sends.
    `after_s`: how long an incident lasts before its first alert. `level`: the lowest level of
    incidents that are reported.
    """

    webhook: Url | None = None
    console: Url | None = None
    after_s: Annotated[float, Number(0, 3600)] = 30.0
    level: Literal["degraded", "down"] = "degraded"


class OtlpConfig(Strict):
    """Export of every answer as a trace, to a collector that speaks OTLP over HTTP (protobuf).

    `endpoint`: address of the collector; None exports nothing. Without a path, `/v1/traces` is
    added. `headers_file`: file with a line `Name: value` for each header, such as the
    collector's key; only this user may have access to the file. `share`: share (0 to 1) of answers
    that are exported, if the client sends no `traceparent`, whose sampling flag decides instead.
    """

    endpoint: ServiceUrl | None = None
    headers_file: Folder | None = None
    share: Annotated[float, Number(0, 1)] = 1.0


class TelemetryConfig(Strict):
    otlp: OtlpConfig = OtlpConfig()


class VoiceConfig(Strict):
    """Settings of the voice sessions of one gateway. Beyond `max_sessions`, up to `max_waiting`
    clients wait in a queue; further clients are refused. `max_calls`: limit on the sessions over
    WebRTC among them, which take more CPU time at the gateway than sessions over WebSockets.

    `send_ahead_s`: how far ahead of playback audio is sent. `reconnect_timeout_s`: how long a
    session waits for a client whose connection was lost. `speculate_ms`: silence after which a
    response is started early, to be discarded if speech continues; 0: never. `partial_ms`: length
    of new speech after which a turn under way is recognised again; 0: never. `max_session_s`:
    longest duration of a session. `idle_s`: time without input from the client and without a
    response after which a session ends. `sessions_per_secret`: sessions that one short-lived secret
    (`ek_...`) may have open or queued at one time, on all gateways together. `secret_share`: share
    of `max_sessions`, `max_waiting` and `max_calls` open to short-lived secrets; the rest is
    reserved for API keys and the console.

    `webrtc_stun`: STUN server (HOST:PORT) by which a gateway behind a router finds its public
    address for WebRTC. `webrtc_address`: public address to use instead, if the router forwards UDP
    ports unchanged. If both are None, calls must come from the gateway's own networks.
    """

    max_sessions: Items = 64
    max_calls: Items = 24
    max_waiting: Annotated[int, Whole(0, 100_000)] = 64
    send_ahead_s: Annotated[float, Number(0.1, 3600)] = 1.0
    reconnect_timeout_s: Annotated[float, Number(0.1, 3600)] = 60.0
    speculate_ms: Annotated[int, Whole(0, 10_000)] = 200
    partial_ms: Annotated[int, Whole(0, 60_000)] = 600
    max_session_s: Annotated[float, Number(1, 86_400)] = 3600.0
    idle_s: Annotated[float, Number(1, 86_400)] = 900.0
    sessions_per_secret: Annotated[int, Whole(1, 1_000_000)] = 1
    secret_share: Annotated[float, Number(0, 1, above=True)] = 0.75
    webrtc_stun: Endpoint | None = None
    webrtc_address: Address | None = None
