"""Dead letters: requests that were given up because workers died over them, stored whole so that
they can be sent again.

The script that counts the last death writes a dead letter, and removes the oldest beyond 1,000
letters or 64 MiB. No process owns a letter, so dropping one needs no fencing. Knows no stage's
work.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import msgspec
from redis import Redis

from fleet.control import keys
from fleet.control.connect import Reply, entry_order, number, stream_entries, text
from fleet.core.errors import BadInput, UnknownWireVersion
from fleet.core.ids import RequestId, StageName
from fleet.core.request import RequestSpec, decode_request


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A request that was given up. `entry`: id in the stream of dead letters. `stage`: stage whose
    workers died over the request. `raw_spec`: the encoded request, which `spec_of` decodes.

    Units: `died_us` since 1970 on Redis's clock. `size_bytes` includes the audio of the prompt,
    which stays in Redis (`keys.dead_letter_blob`).
    """

    entry: str
    request: RequestId
    stage: StageName
    why: str
    died_us: int
    size_bytes: int
    raw_spec: bytes


def read_letters(client: Redis) -> list[DeadLetter]:
    """Return all dead letters, oldest first."""
    return letters_of(client.xrange(keys.DEAD))


def read_letter(client: Redis, request: RequestId) -> DeadLetter:
    """Return the dead letter of one request. Raises: BadInput if there is none."""
    for letter in read_letters(client):
        if letter.request == request:
            return letter
    raise BadInput(f"no dead letter {request!r}; `fleet dead-letters list` shows them", param="id")


def read_blob(client: Redis, letter: DeadLetter) -> bytes | None:
    """Return the prompt audio of a dead letter's request; None if the prompt has no audio."""
    return cast("bytes | None", client.get(keys.dead_letter_blob(letter.request)))


def drop_letters(client: Redis, letters: Sequence[DeadLetter]) -> int:
    """Delete dead letters; return the number of letters that were still there."""
    if not letters:
        return 0
    with client.pipeline(transaction=False) as pipe:
        pipe.unlink(*(keys.dead_letter_blob(letter.request) for letter in letters))
        pipe.xdel(keys.DEAD, *(letter.entry for letter in letters))
        return cast(int, pipe.execute()[1])


def spec_of(letter: DeadLetter) -> RequestSpec:
    """Return the request of a dead letter, as submitted. Raises: UnknownWireVersion if another
    protocol version wrote it.
    """
    try:
        return decode_request(letter.raw_spec)
    except msgspec.MsgspecError as error:
        raise UnknownWireVersion(
            f"the dead letter {letter.request} was written by another version ({error})"
        ) from error


def letters_of(reply: Reply) -> list[DeadLetter]:
    """Return the dead letters in a reply of XRANGE or XREVRANGE."""
    return [
        DeadLetter(
            entry=entry,
            request=RequestId(text(fields["r"])),
            stage=StageName(text(fields["s"])),
            why=text(fields["why"]),
            died_us=entry_order(entry)[0] * 1000,
            size_bytes=number(fields, "n"),
            raw_spec=fields["spec"],
        )
        for entry, fields in stream_entries(reply)
    ]
