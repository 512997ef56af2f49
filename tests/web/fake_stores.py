"""Fake stores of the control plane, in memory: browser logins, alerts, responses and voice
sessions.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fleet.config.api_keys import NO_LIMITS, KeyLimits
from fleet.control.alerts import AlertStore
from fleet.control.logins import LoginStore
from fleet.control.responses import ResponseStore
from fleet.control.voice import OWN_FIELDS, HeldVoice, Saved, VoiceStore
from fleet.core.clock import now_us
from fleet.telemetry.incidents import Alert, AlertEvent


@dataclass(slots=True)
class FakeAlerts(AlertStore):
    """Store of alerts in memory, which the gateways of a test share."""

    known: dict[tuple[str, AlertEvent], Alert] = field(
        default_factory=dict[tuple[str, AlertEvent], Alert]
    )

    async def claim(self, incident: str, alert: Alert, lease_s: int) -> bool:
        return self.known.setdefault((incident, alert.event), alert) is alert

    async def end(self, incident: str, alert: Alert) -> None:
        self.known[incident, alert.event] = alert

    async def read(self, incident: str) -> Mapping[AlertEvent, Alert]:
        return {event: alert for (of, event), alert in self.known.items() if of == incident}


@dataclass(slots=True)
class FakeLogins(LoginStore):
    """Store of browser logins in memory. A lookup reads its answer, then waits for `gate` if a test
    has set it.
    """

    ends: dict[str, int] = field(default_factory=dict[str, int])
    check_reachable: Callable[[], None] = lambda: None
    gate: asyncio.Event | None = None
    num_asked: int = 0
    num_renewed: int = 0

    async def add(self, name: str, keep_s: int) -> None:
        self.check_reachable()
        self.ends[name] = now_us() + keep_s * 1_000_000

    async def ends_us(self, name: str) -> int | None:
        self.check_reachable()
        self.num_asked += 1
        ends_us = self.ends.get(name)
        if self.gate is not None:
            await self.gate.wait()
        return ends_us

    async def renew(self, name: str, keep_s: int) -> None:
        self.check_reachable()
        self.num_renewed += 1
        if name in self.ends:
            self.ends[name] = now_us() + keep_s * 1_000_000

    async def remove(self, name: str) -> None:
        self.check_reachable()
        self.ends.pop(name, None)


@dataclass(slots=True)
class FakeResponses(ResponseStore):
    """Store of responses in memory, without expiry. `records`: owner and record by id."""

    check_reachable: Callable[[], None]
    records: dict[str, tuple[str, bytes]] = field(default_factory=dict[str, tuple[str, bytes]])

    async def save(self, response: str, owner: str, record: bytes) -> None:
        self.check_reachable()
        self.records[response] = (owner, record)

    async def load(self, response: str, owner: str) -> bytes | None:
        self.check_reachable()
        found, record = self.records.get(response, ("", b""))
        return record if record and found == owner else None

    async def delete(self, response: str, owner: str) -> bool:
        found = await self.load(response, owner) is not None
        if found:
            del self.records[response]
        return found


@dataclass(slots=True)
class FakeVoice(VoiceStore):
    """Store of voice sessions, client secrets and transcripts in memory. `ended`: sessions that an
    operator ended, with their owners. `num_saved`: number of session writes.
    """

    check_reachable: Callable[[], None]
    held: dict[str, HeldVoice] = field(default_factory=dict[str, HeldVoice])
    owners: dict[str, str] = field(default_factory=dict[str, str])
    ended: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    secrets: dict[str, bytes] = field(default_factory=dict[str, bytes])
    transcripts: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    num_saved: int = 0

    async def hold(
        self,
        session: str,
        ttl_s: float,
        owner: str,
        *,
        new: bool = False,
        limits: KeyLimits = NO_LIMITS,
    ) -> HeldVoice | None:
        """Register a session as held by `owner`, without the limits of sessions per client secret
        and API key.
        """
        self.check_reachable()
        held = self.held.get(session)
        if (held is not None) == new or (
            held is not None and self.owners.get(session, "") != owner
        ):
            return None
        self.owners[session] = owner
        fields = (
            {name: value for name, value in held.fields.items() if name not in OWN_FIELDS}
            if held
            else {}
        )
        self.held[session] = HeldVoice(epoch=held.epoch + 1 if held else 1, fields=fields)
        return self.held[session]

    async def save(
        self,
        session: str,
        epoch: int,
        owner: str,
        ttl_s: float,
        fields: Mapping[str, bytes],
        removed: Sequence[str] = (),
    ) -> Saved:
        self.check_reachable()
        self.num_saved += 1
        held = self.held.get(session)
        if held is None or held.epoch != epoch:
            return Saved.STALE
        rest = {name: value for name, value in held.fields.items() if name not in removed}
        self.held[session] = dataclasses.replace(held, fields={**rest, **fields})
        return Saved.OK

    async def end(self, session: str, epoch: int | None = None) -> bool:
        self.check_reachable()
        held = self.held.get(session)
        if held is None or epoch not in (None, held.epoch):
            return False
        del self.held[session]
        if epoch is None:
            self.ended.add((session, self.owners.get(session, "")))
        return True

    async def was_ended(self, session: str, owner: str) -> bool:
        self.check_reachable()
        return (session, owner) in self.ended

    async def exists(self, session: str) -> bool:
        self.check_reachable()
        return session in self.held

    async def field_names(self, session: str) -> list[str]:
        self.check_reachable()
        held = self.held.get(session)
        return list(held.fields) if held is not None else []

    async def read(self, session: str, names: Sequence[str]) -> dict[str, bytes]:
        known = await self.field_names(session)
        return {name: self.held[session].fields[name] for name in names if name in known}

    async def views(self) -> dict[str, bytes]:
        self.check_reachable()
        return {
            name: held.fields["view"] for name, held in self.held.items() if "view" in held.fields
        }

    async def save_secret(self, name: str, value: bytes, ttl_s: int) -> None:
        self.check_reachable()
        self.secrets[name] = value

    async def secret(self, name: str) -> bytes | None:
        self.check_reachable()
        return self.secrets.get(name)

    async def save_transcript(self, audio_id: str, transcript: str, expires_at: int) -> int:
        self.check_reachable()
        return self.transcripts.setdefault(audio_id, (transcript, expires_at))[1]

    async def transcript(self, audio_id: str) -> str | None:
        self.check_reachable()
        return self.transcripts.get(audio_id, (None, 0))[0]
