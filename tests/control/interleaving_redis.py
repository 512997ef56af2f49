"""The store of interleaving checks that run Fleet's scripts themselves on a real Redis, so that no
model of the scripts can differ from them. A state is a dump of Redis's keys, restored before each
move; a mutation is a change of the scripts' text. Knows no process.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import msgspec
import redis
from redis.exceptions import ResponseError

from fleet.control import keys
from fleet.control.connect import Reply, exchange
from fleet.control.scripts import SCRIPTS, Arg, Call, source

RESTORE = """
redis.call('UNLINK', unpack(redis.call('KEYS', '*')))
local kept = cmsgpack.unpack(ARGV[1])
for i = 1, #kept, 2 do redis.call('RESTORE', kept[i], 0, kept[i + 1]) end
"""
VIEW = """
local P, call = '{fleet}:', redis.call
local view, kept = {requests = {}, tasks = {}, listed = {}, held = {}, entries = {}, inbox = {},
  suspects = {}, evidence = {}, live = {}}, {}
local function fields_of(key)
  local out, fields = {}, call('HGETALL', key)
  for i = 1, #fields, 2 do out[fields[i]] = fields[i + 1] end
  return out
end
local function number_of(id)
  local ms, n = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(ms) * 1000 + tonumber(n)
end
local function add_entries(key, role)
  local last = '0-0'
  for _, group in ipairs(call('XINFO', 'GROUPS', key)) do
    local of = {}
    for i = 1, #group, 2 do of[group[i]] = group[i + 1] end
    if of.name == 'workers' then last = of['last-delivered-id'] end
  end
  for _, entry in ipairs(call('XRANGE', key, '-', '+')) do
    local f, of = entry[2], view.entries[role] or {}
    local is_read = number_of(entry[1]) <= number_of(last)
    of[#of + 1] = {f[2] .. '|' .. f[4], f[6], f[8], entry[1], is_read and 'read' or ''}
    view.entries[role] = of
  end
end
local WANTED = {g = true, x = true, y = true}
local function add_inbox(key, w)
  local of = {}
  for _, entry in ipairs(call('XRANGE', key, '-', '+')) do
    local f = {}
    for i = 1, #entry[2], 2 do f[entry[2][i]] = entry[2][i + 1] end
    if WANTED[f.k] then of[#of + 1] = {f.k, f.r, f.s or '', f.e or '', f.a or ''}
    else call('XDEL', key, entry[1]) end
  end
  if #of > 0 then view.inbox[w] = of end
end
local function sorted(members) table.sort(members) return members end
local READERS = {
  {'^req:([^:]*):task:(.*)$', function(key, r, s) view.tasks[r .. '|' .. s] = fields_of(key) end},
  {'^req:([^:]*)$', function(key, r)
    view.requests[r] = {call('HGET', key, 'state'), call('HGET', key, 'code') or ''}
  end},
  {'^workers$', function(key)
    local listed = call('ZRANGE', key, 0, -1, 'WITHSCORES')
    for i = 1, #listed, 2 do view.listed[listed[i]] = listed[i + 1] end
  end},
  {'^live$', function(key)
    for _, r in ipairs(call('SMEMBERS', key)) do view.live[r] = '1' end
  end},
  {'^worker:(.*):tasks$', function(key, w) view.held[w] = sorted(call('SMEMBERS', key)) end},
  {'^role:(.*)$', add_entries},
  {'^inbox:(.*)$', add_inbox},
  {'^suspects:(.*)$', function(key, group)
    view.suspects[group] = sorted(call('SMEMBERS', key))
  end},
  {'^gone:(.*):tasks$', function(key, w) view.evidence[w] = fields_of(key) end},
}
-- By these keys, no script decides about a task.
local DROPPED = {'^events$', '^logs', '^series:', ':trace$', '^index:', '^gone$',
  '^gone:[^:]*:[^:]*:[^:]*$', '^refus', '^dead_letter', '^retained', '^settings_group', '^places$',
  '^live:clients$', '^availability:', '^inbox:gateway',
  '^worker:gateway[^:]*:[^:]*:[^:]*$'}
for _, key in ipairs(call('KEYS', P .. '*')) do
  local name, is_dropped = string.sub(key, #P + 1), false
  for _, pattern in ipairs(DROPPED) do is_dropped = is_dropped or string.find(name, pattern) end
  for _, reader in ipairs(READERS) do
    local first, second = string.match(name, reader[1])
    if first then
      reader[2](key, first, second)
      break
    end
  end
  if not is_dropped then
    kept[#kept + 1] = key
    kept[#kept + 1] = call('DUMP', key)
  end
end
return {cjson.encode(view), cmsgpack.pack(kept)}
"""


class Entry(NamedTuple):
    """A grant in a role's stream. `pair`: request and stage, joined by `|`."""

    pair: str
    epoch: str
    group: str
    id: str
    is_read: str


class NoticeSeen(NamedTuple):
    """An inbox entry: a grant ("g"), or the order to drop a task ("x", "y")."""

    kind: str
    request: str
    stage: str
    epoch: str
    group: str


class View(msgspec.Struct, frozen=True):
    """Redis's state, as far as scripts decide by it. `tasks`: hashes of tasks, by `request|stage`.

    `listed`: lease deadlines of workers. `held`: tasks owned by or reserved for each worker.
    `entries`: grants, by role. `suspects`: members of each half. `evidence`: what each silent
    worker computed.
    """

    requests: dict[str, tuple[str, str]]
    tasks: dict[str, dict[str, str]]
    listed: dict[str, str]
    held: dict[str, list[str]]
    entries: dict[str, list[Entry]]
    inbox: dict[str, list[NoticeSeen]]
    suspects: dict[str, list[str]]
    evidence: dict[str, dict[str, str]]
    live: dict[str, str]

    def is_current(self, pair: str, epoch: str | int) -> bool:
        task = self.tasks.get(pair)
        return task is not None and task["epoch"] == str(epoch)


Command = Call | tuple[Arg, ...]


class Mutation(NamedTuple):
    """A wrong rule: every match of `pattern` in the text of the scripts is replaced."""

    pattern: str
    replacement: str
    scripts: Sequence[str] = SCRIPTS


_decode_view = msgspec.json.Decoder(View).decode


class RealStore:
    """Runs plans on Redis, with the scripts or with mutated ones."""

    def __init__(self, client: redis.Redis, mutation: Mutation | None = None) -> None:
        self._client = client
        self._hashes: dict[str, str] = {}
        for name in SCRIPTS:
            text = source(name)
            if mutation is not None and name in mutation.scripts:
                text = re.sub(mutation.pattern, mutation.replacement, text)
            if text != source(name) or mutation is None:
                self._hashes[name] = self._load(text)
        assert self._hashes, f"no script has {mutation}"
        for name in SCRIPTS:
            self._hashes.setdefault(name, self._load(source(name)))
        self._restore, self._view = self._load(RESTORE), self._load(VIEW)

    def _load(self, text: str) -> str:
        return str(self._client.script_load(text))

    def _sent(self, command: Command) -> tuple[Arg, ...]:
        if isinstance(command, Call):
            return ("EVALSHA", self._hashes[command.script], *keys.DECLARED, *command.args)
        return command

    def begin(self, commands: Sequence[Command]) -> tuple[list[Reply], View, bytes]:
        """Run commands on an empty Redis; return their replies, and the state after them."""
        self._client.flushdb()
        replies = exchange(self._client, (), *map(self._sent, commands), self._viewing())
        return replies[:-1], *_seen(replies[-1])

    def run(
        self, dump: bytes, sequences: Sequence[Sequence[Command]]
    ) -> Iterator[tuple[list[Reply], View, bytes]]:
        """Run each sequence of commands on the state in `dump`, in one round trip; return the
        replies of each, and the state after it.
        """
        restoring = ("EVALSHA", self._restore, *keys.DECLARED, dump)
        sent: list[tuple[Arg, ...]] = []
        for commands in sequences:
            sent += [restoring, *map(self._sent, commands), self._viewing()]
        try:
            replies = exchange(self._client, (), *sent) if sent else []
        except ResponseError as error:
            raise AssertionError(f"a script fails: {error}") from error
        position = 0
        for commands in sequences:
            end = position + len(commands) + 2
            yield replies[position + 1 : end - 1], *_seen(replies[end - 1])
            position = end

    def _viewing(self) -> tuple[Arg, ...]:
        return ("EVALSHA", self._view, *keys.DECLARED)


def _seen(reply: Reply) -> tuple[View, bytes]:
    view, dump = cast("list[bytes]", reply)
    return _decode_view(view), dump
