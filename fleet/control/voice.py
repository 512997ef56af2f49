"""Voice sessions, client secrets and transcripts in Redis. A session is written under an epoch, so
that one gateway at a time can write it.

Knows no conversation.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from fleet.config.api_keys import NO_LIMITS, KeyLimits
from fleet.config.schema import VoiceConfig
from fleet.control import keys, scripts
from fleet.control.admission import key_refusal
from fleet.control.connect import answer_of, pairs, run_async, text, unreachable
from fleet.control.membership import Membership
from fleet.control.outage import Outage, is_away
from fleet.core.errors import SecretInUse


class Saved(StrEnum):
    """Result of a write to a voice session. After `RESTORED` the gateway must write every field
    again, since Redis had lost writes.
    """

    OK = "ok"
    RESTORED = "restored"
    STALE = "stale"
    """The write was refused: another gateway holds the session, or the session has ended."""


OWN_FIELDS = ("epoch", "holder", "owner", "started_us", "away_us", "counted_us")
"""Fields of a session's record that the scripts write; the gateway that holds the session writes
the rest.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldVoice:
    """A voice session that this gateway holds. `epoch`: fencing token for every write. `fields`:
    fields that the last gateway wrote.

    `replaced`: sessions of the same owner that were ended to make room for this session. `age_s`:
    seconds since the start of the session, on Redis's clock.
    """

    epoch: int
    age_s: float = 0.0
    fields: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    replaced: tuple[str, ...] = ()


class VoiceStore:
    """Store of voice sessions, client secrets and transcripts. Any method may raise
    RedisUnreachable.
    """

    def __init__(self, client: Redis, config: VoiceConfig, membership: Membership) -> None:
        self._redis = client
        self._config = config
        self._membership = membership

    async def hold(
        self,
        session: str,
        ttl_s: float,
        owner: str,
        *,
        new: bool = False,
        limits: KeyLimits = NO_LIMITS,
    ) -> HeldVoice | None:
        """Take over a voice session, or with `new` open one. The session's former gateway can no
        longer write to it.

        `owner`: credential that opened the session: KEY, the name of an API key, or KEY/HASH for a
        client secret that this key has created; KEY is "" at a gateway without keys. `ttl_s`:
        seconds after which the session expires unless it is saved. `limits`: limits of the API key,
        checked with `new` only.
        Returns None if `owner` has no session of that name or, with `new`, if the session exists
        already.
        Raises: SecretInUse if the client secret `owner` already has `voice.sessions_per_secret`
        open sessions; KeyAtLimit if the key is at one of its limits.
        """
        bound = self._config.sessions_per_secret
        call = scripts.hold_voice(
            session,
            self._membership.id,
            int(ttl_s * 1000),
            owner,
            new=new,
            bound=bound,
            limits=limits,
        )
        answer = cast("list[object]", await answer_of(run_async(self._redis, call)))
        if answer and text(answer[0]) == "key_limit":
            raise key_refusal(list(map(text, answer)), owner.partition("/")[0], limits)
        if len(answer) == 1:
            have = "a session" if bound == 1 else f"{bound} sessions"
            raise SecretInUse(
                f"this client secret has {have} open or queued, its maximum "
                "(voice.sessions_per_secret); continue one with ?session=ID, end one, or create "
                "another secret at "
                "/v1/realtime/client_secrets"
            )
        if not answer:
            return None
        epoch, age_us, fields, replaced = answer
        return HeldVoice(
            epoch=int(text(epoch)),
            age_s=int(text(age_us)) / 1e6,
            fields={name: value for name, value in pairs(fields).items() if name not in OWN_FIELDS},
            replaced=tuple(text(name) for name in cast("list[object]", replaced)),
        )

    async def save(
        self,
        session: str,
        epoch: int,
        owner: str,
        ttl_s: float,
        fields: Mapping[str, bytes],
        removed: Sequence[str] = (),
    ) -> Saved:
        """Write fields of a held session, delete the fields `removed`, and renew the session's time
        to live.
        """
        # The holder is written each time: a gateway has a new id after its lease has lapsed.
        written = {**fields, "holder": self._membership.id.encode()}
        call = scripts.save_voice(session, epoch, int(ttl_s * 1000), owner, written, removed)
        return Saved(text(await answer_of(run_async(self._redis, call))))

    async def end(self, session: str, epoch: int | None = None) -> bool:
        """Delete a session. With `epoch`, delete it only if it is still held at that epoch. Return
        True if the session was deleted.
        """
        return (
            text(await answer_of(run_async(self._redis, scripts.end_voice(session, epoch)))) == "ok"
        )

    async def was_ended(self, session: str, owner: str) -> bool:
        """Return True if an operator has ended this voice session of `owner` in the last 10
        minutes.
        """
        return text(await answer_of(self._redis.get(keys.voice_ended(session)))) == f"1{owner}"

    async def exists(self, session: str) -> bool:
        """Return True if this session is open, even if the gateway that held it is gone."""
        return bool(await answer_of(self._redis.exists(keys.voice(session))))

    async def field_names(self, session: str) -> list[str]:
        """Return the names of a session's fields; empty if there is no such session."""
        found = await answer_of(self._redis.hkeys(keys.voice(session)))
        return [text(name) for name in cast("list[bytes]", found)]

    async def read(self, session: str, names: Sequence[str]) -> dict[str, bytes]:
        """Return the values of these fields of a session; fields that the session lacks are left
        out.
        """
        if not names:
            return {}
        found = await answer_of(self._redis.hmget(keys.voice(session), list(names)))
        values = cast("list[bytes | None]", found)
        return {name: raw for name, raw in zip(names, values, strict=True) if raw is not None}

    async def views(self) -> dict[str, bytes]:
        """Return, by session name, the description of each session that its gateway wrote as the
        field `view`.
        """
        return await answer_of(self._views())

    async def _views(self) -> dict[str, bytes]:
        seconds, micros = await self._redis.time()
        await self._redis.zremrangebyscore(keys.VOICES, "-inf", seconds * 1_000_000 + micros)
        names = [
            text(name) for name in cast("list[bytes]", await self._redis.zrange(keys.VOICES, 0, -1))
        ]
        pipe = self._redis.pipeline(transaction=False)
        for name in names:
            pipe.hget(keys.voice(name), "view")
        views = cast("list[bytes | None]", await pipe.execute()) if names else []
        return {name: view for name, view in zip(names, views, strict=True) if view is not None}

    async def save_secret(self, name: str, value: bytes, ttl_s: int) -> None:
        """Save the settings of a client secret, for all gateways, for `ttl_s` seconds."""
        await answer_of(self._redis.set(keys.secret(name), value, ex=ttl_s))

    async def secret(self, name: str) -> bytes | None:
        """Return the settings of a client secret; None if the secret is unknown or has expired."""
        return cast("bytes | None", await answer_of(self._redis.get(keys.secret(name))))

    async def save_transcript(self, audio_id: str, transcript: str, expires_at: int) -> int:
        """Save the text of a spoken answer, unless it is saved already, so that later turns at any
        gateway can refer to it by `audio_id`.

        `expires_at`: time of expiry in seconds since 1970. Return the time that the first call has
        set, so that a stream that is read again is identical. Waits while Redis is away: the answer
        itself is complete, and must not fail at its end.
        """
        pauses = Outage("the transcript of an answer")
        while True:
            try:
                return await self._save_transcript(audio_id, transcript, expires_at)
            except RedisError as error:
                if not is_away(error):
                    raise unreachable(error) from error
            # Without a log line: the gateway logs the outage, once.
            await asyncio.sleep(pauses.pause_s())

    async def _save_transcript(self, audio_id: str, transcript: str, expires_at: int) -> int:
        """Save a transcript as `save_transcript` does, without waiting for Redis. Raises: redis's
        errors.
        """
        key = keys.transcript(audio_id)
        pipe = self._redis.pipeline(transaction=True)
        pipe.hsetnx(key, "text", transcript)
        pipe.hsetnx(key, "expires_at", str(expires_at))
        pipe.expireat(key, expires_at)
        pipe.hget(key, "expires_at")
        *_, saved = await pipe.execute()
        return int(text(saved))

    async def transcript(self, audio_id: str) -> str | None:
        """Return the text of a spoken answer; None if it has expired."""
        raw = await answer_of(self._redis.hget(keys.transcript(audio_id), "text"))
        return None if raw is None else text(raw)
