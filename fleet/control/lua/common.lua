-- Definitions of the scripts, each of which contains the definitions that it uses
-- (`lua_source.py`). `task_moves` and `request_moves`, which precede these definitions, are written
-- by `lua_source.py` from the tables in `fleet/conductor/states.py`.
-- All keys begin with PREFIX, and all times are Redis's own, in microseconds. `task` is the key of
-- a task's hash, `request_key` the key of a request's; `request`, `stage`, `worker` and `edge` are
-- names.
local PREFIX = '{fleet}:'
local call = redis.call
local MAX_EVENTS = 20000
local MAX_INBOX = 200000
local MAX_DEAD, MAX_DEAD_BYTES = 1000, 67108864
local MAX_LOGS, MAX_FACTS = 20000, 10000
local MAX_NAMED_TASKS = 60
local MAX_INDEX = 20000
local MAX_TRACE_EVENTS = 400
local MAX_GONE = 200
local GONE_S = 600
local SERIES_STEP_US, SERIES_KEPT_S = 5000000, 1000
local OVERDUE_SLICE = 100
local ENDLESS = '9000000000000000'
local MAX_FAILED_STARTS, USUAL_START_US, MAX_START_US = 3, 5000000, 120000000
local FORGET_TRIES_US = 60000000
local FENCE_SLICE = 50
local SWEEP_SLICE = 50
-- Deaths over a task without progress before it runs alone: until then, another task of the batch
-- may be the cause. Beyond that number a death alone condemns the request.
local MAX_DEATHS = 2
local REFUSING_S = 10
local VOICE_ENDED_MS = 600000
local REFUSED_KEPT_S, MAX_REFUSED = 3600, 100

-- Return Redis's time, which is asked for once per call of a script.
local script_time_us = nil
local function now_us()
  if not script_time_us then
    local seconds, microseconds = unpack(call('TIME'))
    script_time_us = tonumber(seconds) * 1000000 + tonumber(microseconds)
  end
  return script_time_us
end
-- Let this script run although Redis's memory is full: Redis compares `maxmemory` only before the
-- first write of a script, and not before a deletion. To be called before any other write, by
-- scripts that free, end or keep what exists; scripts that add work are refused as a whole. The key
-- never exists.
local function pass_when_full() call('DEL', PREFIX .. 'none') end
-- Return a whole number as text.
local function int(number) return string.format('%.0f', number) end
local function task_key(request, stage) return PREFIX .. 'req:' .. request .. ':task:' .. stage end
local function edge_key(request, edge) return PREFIX .. 'req:' .. request .. ':edge:' .. edge end
local function location_key(request, edge) return PREFIX .. 'req:' .. request .. ':loc:' .. edge end
local function kv_key(request, stage) return PREFIX .. 'req:' .. request .. ':kv:' .. stage end
local function tasks_of(worker) return PREFIX .. 'worker:' .. worker .. ':tasks' end
local function publish_event(json)
  call('XADD', PREFIX .. 'events', 'MAXLEN', '~', MAX_EVENTS, '*', 'e', json)
end
local function notify(worker, ...)
  -- An unlisted worker has no inbox; a new one would be a key without an end.
  call('XADD', PREFIX .. 'inbox:' .. worker, 'NOMKSTREAM', 'MAXLEN', '~', MAX_INBOX, '*', ...)
end
-- The news of one call for the same process are one entry of its inbox, whose fields are numbered:
-- 'h' a chunk's header, 'p' a chunk to be read from its log (request|edge|index), 'l' where the
-- tensors of the chunk before are, 'a' credit (request|edge|chunks consumed). Only a header of at
-- most `MAX_NOTICE_HEADER` bytes is in the inbox too: to read a short one costs more than to write
-- it twice.
local MAX_NOTICE_HEADER = 256
local MAX_NEWS = 400
local news = {}
local function send_news()
  for worker, fields in pairs(news) do
    notify(worker, 'k', 'n', unpack(fields))
  end
  news = {}
end
local function add_news(worker, kind, value)
  if news[worker] and #news[worker] > MAX_NEWS and kind ~= 'l' then send_news() end
  local fields = news[worker] or {}
  local num_fields = #fields
  news[worker] = fields
  fields[num_fields + 1] = kind .. num_fields
  fields[num_fields + 2] = value
end
-- Log to the fleet's log in the script that decides what the line says. Returns the entry's id and
-- fields.
local function log_line(level, process, worker, stage, request, message)
  local fields = {
    't', int(now_us()), 'l', level, 'n', 'fleet.control', 'p', process,
    'w', worker or '', 's', stage or '', 'r', request or '', 'm', message,
  }
  return call('XADD', PREFIX .. 'logs', 'MAXLEN', '~', MAX_LOGS, '*', unpack(fields)), fields
end
-- Log a fact of the fleet in the script that writes it: once per fact, whichever processes see it.
-- It is kept apart too, since lines that clients cause may trim it from the log; under the same id,
-- so that a reader can continue in one list where the other ends.
local function log_fact(...)
  local id, fields = log_line(...)
  local facts = PREFIX .. 'logs:facts'
  -- The id is refused if the log was deleted, and Redis's clock set back: then any id is better
  -- than none.
  for _, fact_id in ipairs({id, '*'}) do
    local added =
      redis.pcall('XADD', facts, 'MAXLEN', '~', MAX_FACTS, fact_id, unpack(fields))
    if type(added) ~= 'table' then break end
  end
end
-- Return the tasks that a worker or gateway holds, as text, and their request if all are of the
-- same one.
local function held_by(worker)
  local named, only_request = {}, nil
  local held = call('SMEMBERS', tasks_of(worker))
  table.sort(held)
  for number, pair in ipairs(held) do
    local request, stage = string.match(pair, '^(.-)|(.+)$')
    if number <= MAX_NAMED_TASKS then named[number] = request .. ' (' .. stage .. ')' end
    only_request = (number == 1 or only_request == request) and request or ''
  end
  if #named == 0 then return 'nothing', '' end
  local more = #held > #named and ' and ' .. #held - #named .. ' more' or ''
  return table.concat(named, ', ') .. more, only_request
end
-- Return the labels `process` and `stage` of a log line about a worker of the role; a gateway has
-- none.
local function labels_of(role)
  if role == '' then return 'web', '' end
  return 'worker', string.match(role, '^[^.]+')
end
-- Append an event to the trace of a known request. No script decides by the trace.
local function trace(request, what, stage, epoch, worker, detail)
  local key = PREFIX .. 'req:' .. request .. ':trace'
  local line = int(now_us()) .. '|' .. what .. '|' .. stage .. '|' .. (epoch or '') .. '|' ..
    (worker or '') .. '|' .. (detail or '')
  if call('RPUSH', key, line) > MAX_TRACE_EVENTS then call('LTRIM', key, -MAX_TRACE_EVENTS, -1) end
end
-- Add one to a field of the present step of the fleet's time series.
local function count(field)
  local key = PREFIX .. 'series:' .. int(math.floor(now_us() / SERIES_STEP_US))
  if call('HINCRBY', key, field, 1) == 1 then call('EXPIRE', key, SERIES_KEPT_S) end
end
-- Count a duration in its bucket, by the bounds of `fleet.telemetry.counts`.
local function count_us(field, duration_us)
  local bucket = math.ceil(20 * math.log(math.max(duration_us, 1) / 100) / math.log(10))
  count(field .. ':' .. int(math.max(0, math.min(100, bucket))))
end
-- Set the request's state in its hash and in the index, which only orders.
local function set_state(request, state)
  local request_key = PREFIX .. 'req:' .. request
  local before = call('HGET', request_key, 'state')
  if before == state then return end
  local is_allowed = request_moves()[before or ''][state]
  assert(is_allowed, 'a ' .. (before or 'new') .. ' request cannot be ' .. state)
  if before then call('ZREM', PREFIX .. 'index:' .. before, request) end
  call('HSET', request_key, 'state', state)
  call('ZADD', PREFIX .. 'index:' .. state, 0, request)
end
-- Remove expired requests from the index, and the oldest ended ones beyond its bound.
local function prune_index()
  local expires = PREFIX .. 'index:expires'
  local due = call('ZRANGEBYSCORE', expires, '-inf', int(now_us()), 'LIMIT', 0, 20)
  if #due == 0 and call('ZCARD', PREFIX .. 'index:all') > MAX_INDEX then
    due = call('ZRANGE', expires, 0, 19)
  end
  for _, request in ipairs(due) do
    for _, index in ipairs({'expires', 'all', 'finished', 'failed', 'aborted'}) do
      call('ZREM', PREFIX .. 'index:' .. index, request)
    end
  end
end
local STATUSES = {'accepting', 'leaving', 'ordered_off', 'standby'}
local function role_workers_key(role, status)
  return PREFIX .. 'role_workers:' .. role .. ':' .. status
end
local function settings_group_key(group) return PREFIX .. 'settings_group:' .. group end
-- Return the status under which a worker is indexed: "leaving" drains by its own decision,
-- "ordered_off" by an operator's order.
local function status_of(standby, draining, ordered_off)
  if standby == '1' then return 'standby' end
  if ordered_off == '1' then return 'ordered_off' end
  return draining == '1' and 'leaving' or 'accepting'
end
-- Set a worker's place in the indexes of listed workers: with its lease deadline in the set of its
-- role and status and in the set of its settings, in none once it is unlisted. Every script that
-- lists it or changes these fields of its hash calls this after.
local function index_worker(worker)
  local role, standby, draining, ordered_off, group = unpack(
    call('HMGET', PREFIX .. 'worker:' .. worker,
      'role', 'standby', 'draining', 'ordered_off', 'settings_group'))
  local deadline = call('ZSCORE', PREFIX .. 'workers', worker)
  if role and role ~= '' then
    local present = deadline and status_of(standby, draining, ordered_off)
    for _, status in ipairs(STATUSES) do
      if status == present then
        call('ZADD', role_workers_key(role, status), deadline, worker)
      else
        call('ZREM', role_workers_key(role, status), worker)
      end
    end
  end
  if not group then return end
  if deadline then
    call('ZADD', settings_group_key(group), deadline, worker)
    call('SADD', PREFIX .. 'settings_groups', group)
  else
    call('ZREM', settings_group_key(group), worker)
    if call('EXISTS', settings_group_key(group)) == 0 then
      call('SREM', PREFIX .. 'settings_groups', group)
    end
  end
end
-- Return the place (host:pid) in a worker's id; nil for an id without one.
local function place_of(worker) return string.match(worker, '@([^:]*:[^:]*):') end
-- Let a standby worker accept tasks.
local function end_standby(worker)
  call('HSET', PREFIX .. 'worker:' .. worker, 'standby', '')
  index_worker(worker)
  notify(worker, 'k', 'p')
end
-- Let a standby worker of the role accept tasks, if there is one: the one with the longest lease is
-- surely alive.
local function promote(role)
  local standby = role_workers_key(role, 'standby')
  local worker = call('ZREVRANGEBYSCORE', standby, '+inf', int(now_us()), 'LIMIT', 0, 1)[1]
  if worker then end_standby(worker) end
end
local function availability_key(role) return PREFIX .. 'availability:' .. role end
-- Return until when an announced start counts (us), the number of a keeper's start ("" for a
-- process), and the percentage of its weights that is loaded (nil unknown).
local function start_of(value)
  local ends, number, loaded = string.match(value, '^(%d+) ?(%d*) ?(%d*)$')
  return tonumber(ends), number, tonumber(loaded)
end
-- Withdraw the announced start at `place`. A start that did not fail is no try.
local function withdraw_start(key, place, failed)
  if call('HDEL', key, 'start:' .. place) == 0 then return false end
  if not failed and tonumber(call('HGET', key, 'tries') or '0') > 0 then
    call('HINCRBY', key, 'tries', -1)
  end
  return true
end
-- Return the latest lease deadline (us) of a role's workers of these statuses; 0 without one.
local function latest_deadline(role, ...)
  local latest = 0
  for _, status in ipairs({...}) do
    local key = role_workers_key(role, status)
    local _, deadline = unpack(call('ZREVRANGE', key, 0, 0, 'WITHSCORES'))
    latest = math.max(latest, tonumber(deadline or '0'))
  end
  return latest
end
-- Return the announced starts and losses of a role, and until when they alone let it admit
-- requests. Announced starts are ignored once too many have failed in a row, and times far in the
-- future are (Redis's clock may have been set back).
local function announced(role, grace_us, now)
  local found = {}
  local starting, starting_until, most_loaded = 0, 0, nil
  local fields = call('HGETALL', availability_key(role))
  for i = 1, #fields, 2 do
    local field, value = fields[i], fields[i + 1]
    if string.sub(field, 1, 6) ~= 'start:' then
      found[field] = tonumber(value)
    else
      local ends, _, loaded = start_of(value)
      if ends > now and ends <= now + MAX_START_US then
        starting = starting + 1
        starting_until = math.max(starting_until, ends)
        if loaded then most_loaded = math.max(most_loaded or 0, loaded) end
      end
    end
  end
  if (found.tries or 0) - starting >= MAX_FAILED_STARTS * (found.workers or 1) then
    starting, starting_until, most_loaded = 0, 0, nil
  end
  for _, name in ipairs({'lost_us', 'left_us'}) do
    if (found[name] or 0) > now + grace_us then found[name] = nil end
  end
  found.loaded = most_loaded
  found.starting = starting
  found.admits_until = math.max((found.lost_us or 0) + grace_us, starting_until)
  return found
end
-- The one rule by which roles expect a worker, for each of `roles` in order. New requests are
-- admitted (`admits`) while the role has a worker that serves, had its last one less than
-- `grace_us` ago, or has one starting. A worker that was ordered to drain or stop does not count;
-- one that leaves by its own decision does, since it is started again. Requests in flight are kept
-- (`keeps`) on the same terms, and for `grace_us` after a worker was ordered to drain or stop.
-- `starting` counts the starts, and the most advanced of them has `loaded` per cent of its weights
-- (nil unknown); `retry_us` is the time until a retry, estimated from the duration of the last
-- start.
local function availability(roles, grace_us)
  local now, out = now_us(), {}
  for i, role in ipairs(roles) do
    local found = announced(role, grace_us, now)
    local serving = latest_deadline(role, 'accepting', 'leaving')
    local stopping = latest_deadline(role, 'ordered_off', 'standby')
    local present = math.max(serving, stopping, found.left_us or 0)
    local admits = math.max(serving + grace_us, found.admits_until) > now
    out[i] = {
      admits = admits,
      keeps = admits or present + grace_us > now,
      starting = found.starting,
      loaded = found.loaded,
      retry_us = math.max((found.next_us or 0) - now, 0) + (found.took_us or USUAL_START_US),
    }
  end
  return out
end
-- Return the state of a task in `state` (nil: it was never granted) after what happened to it; nil
-- if the table forbids that.
local function next_state(happened, state) return task_moves()[happened][state or ''] end
-- Change a task's state by what happened to it, and its place in the indexes that the conductor
-- queries: unclaimed grants, and requests without a gateway; set other fields of the task with it.
-- Every write of a task's state is by this function. A move that the table forbids is an error; a
-- script that may meet one compares with `next_state` before its first write.
local function move(task, request, stage, happened, ...)
  local before = call('HGET', task, 'state') or ''
  local after = next_state(happened, before)
  local described = before ~= '' and before or 'new'
  assert(after, 'a task that is ' .. described .. ' cannot be ' .. happened)
  call('HSET', task, 'state', after, ...)
  if after == 'granted' then
    call('ZADD', PREFIX .. 'granted', int(now_us()), request .. '|' .. stage)
  elseif before == 'granted' then
    call('ZREM', PREFIX .. 'granted', request .. '|' .. stage)
  end
  if stage ~= 'client' then return end
  if after == 'lost' then
    call('ZADD', PREFIX .. 'without_gateway', int(now_us()), request)
  elseif before == 'lost' then
    call('ZREM', PREFIX .. 'without_gateway', request)
  end
end
-- Return why the owner of the task at this epoch may not write; nil if the task runs at this epoch
-- and its request is live.
local function refusal_of(task, request, epoch)
  local present_epoch, state = unpack(call('HMGET', task, 'epoch', 'state'))
  if present_epoch ~= epoch then return 'stale' end
  if call('SISMEMBER', PREFIX .. 'live', request) == 0 then return 'ended' end
  return state ~= 'running' and 'stale' or nil
end
-- Return why the owner of the task at this epoch can import no blocks ("released": none are
-- offered); else nil and the worker that offers them.
local function refused_offer(request, stage, epoch)
  if call('HGET', task_key(request, stage), 'epoch') ~= epoch then return 'stale' end
  if call('SISMEMBER', PREFIX .. 'live', request) == 0 then return 'ended' end
  local state, source = unpack(call('HMGET', kv_key(request, stage), 'state', 'source'))
  if state ~= 'offered' then return 'released' end
  return nil, source
end
-- Return true if an epoch is below another epoch, as text. An epoch above Redis's proves that Redis
-- lost the write that raised it.
local function is_older(epoch, other) return tonumber(epoch) < tonumber(other or '0') end
-- Return why a worker may not write to the records of training, nil if it may: it must be listed
-- and not stand by, and, where it names an epoch, have the right to train at that epoch. An
-- operator ("") may.
local function training_refusal(worker, epoch)
  if worker == '' then return nil end
  if not call('ZSCORE', PREFIX .. 'workers', worker) then return 'unlisted' end
  if call('HGET', PREFIX .. 'worker:' .. worker, 'standby') == '1' then return 'unlisted' end
  local trainer, present_epoch = unpack(call('HMGET', PREFIX .. 'training', 'trainer', 'epoch'))
  if epoch ~= '' and (trainer ~= worker or present_epoch ~= epoch) then return 'stale' end
end
-- Return the number in the record of a version of the draft head; "0" without a record, as for the
-- head of the start.
local function number_of_version(record)
  return string.match(record or '', '"number":(%d+)') or '0'
end
local function is_leader(value) return call('GET', PREFIX .. 'conductor') == value end
-- Raise an epoch above its former value, the time of Redis, and `seen` ("" none): an epoch that a
-- holder has and Redis lost.
local function raise_epoch(key, seen)
  local written = tonumber(call('HGET', key, 'epoch') or '0')
  local former, now = math.max(written, tonumber(seen or '') or 0), now_us()
  -- Redis may lose its last writes, and must not issue their epochs again. The time differs; behind
  -- a clock that was set back, its part below a second.
  local epoch = int(now > former and now or former + 1 + now % 1000000)
  call('HSET', key, 'epoch', epoch)
  return epoch
end
local function remove_owner(task, request, stage)
  local owner = call('HGET', task, 'owner')
  if owner and owner ~= '' then
    call('SREM', tasks_of(owner), request .. '|' .. stage)
    call('HSET', task, 'owner', '')
  end
  return owner
end
-- The key of one of a role's two streams of grants; the task's field `first` says in which its
-- entry is. A task waits in the first if it was granted to the role before: it has begun, or its
-- turn had come. Workers empty it before the other (`read_grants`).
local function role_key(role, first)
  return PREFIX .. 'role:' .. role .. (first and ':first' or '')
end
local function delete_entry(task)
  local role, entry, first = unpack(call('HMGET', task, 'role', 'entry', 'first'))
  if role and entry then call('XDEL', role_key(role, first == '1'), entry) end
end
-- Return the id of the last entry of a role's stream that was read as a grant.
local function last_read(key)
  for _, fields in ipairs(redis.pcall('XINFO', 'GROUPS', key)) do
    local group = {}
    for i = 1, #fields, 2 do
      group[fields[i]] = fields[i + 1]
    end
    if group.name == 'workers' then return group['last-delivered-id'] end
  end
  return '0-0'
end
-- Withdraw an unclaimed grant from its stream, and from the worker that reserves a slot for it.
local function withdraw(task, request, stage)
  local reserved_for = call('HGET', task, 'reserved_for')
  if reserved_for then
    call('SREM', tasks_of(reserved_for), request .. '|' .. stage)
    call('HDEL', task, 'reserved_for')
  end
  delete_entry(task)
end
local function voices_of(owner) return PREFIX .. 'voices_of:' .. owner end
-- Renew a voice session's time to live. A client secret's sessions are also listed under that
-- secret with the same time: a session whose gateway stopped renewing it is not counted, and the
-- list ends with the last of them.
local function list_voice(session, owner, ttl_ms)
  local ends = int(now_us() + tonumber(ttl_ms) * 1000)
  call('PEXPIRE', PREFIX .. 'voice:' .. session, ttl_ms)
  call('ZADD', PREFIX .. 'voices', ends, session)
  call('ZREMRANGEBYSCORE', PREFIX .. 'voices', '-inf', int(now_us()))
  if owner == '' then return end
  local voices = voices_of(owner)
  call('ZREMRANGEBYSCORE', voices, '-inf', int(now_us()))
  call('ZADD', voices, ends, session)
  if call('PTTL', voices) < tonumber(ttl_ms) then call('PEXPIRE', voices, ttl_ms) end
end
-- Delete a voice session and record its end.
local function forget_voice(session, owner, by_operator)
  local ended_by = by_operator and '1' .. owner or '0'
  call('SET', PREFIX .. 'voice_ended:' .. session, ended_by, 'PX', VOICE_ENDED_MS)
  call('DEL', PREFIX .. 'voice:' .. session)
  call('ZREM', PREFIX .. 'voices', session)
  if owner ~= '' then call('ZREM', voices_of(owner), session) end
end
local function split(text)
  local words = {}
  for word in string.gmatch(text or '', '[^,]+') do
    words[#words + 1] = word
  end
  return words
end
-- Return true if the task's owner may have been working on it: on a chunk beyond those consumed
-- when it last reported idle, or, for a task without inputs, on the request itself.
local function had_work(task, request)
  local inputs = split(call('HGET', task, 'inputs'))
  for _, edge in ipairs(inputs) do
    local num_chunks = call('XLEN', edge_key(request, edge))
    if num_chunks > tonumber(call('HGET', task, 'idle_consumed:' .. edge) or '0') then
      return true
    end
  end
  return #inputs == 0
end
-- Return the number of chunks that a task has appended.
local function produced_by(task)
  local produced, fields = 0, call('HGETALL', task)
  for i = 1, #fields, 2 do
    local field, value = fields[i], fields[i + 1]
    if string.sub(field, 1, 9) == 'produced:' then produced = produced + tonumber(value) end
  end
  return produced
end
-- Count a death over a task; return the number of deaths since its last append.
local function count_death(task)
  local produced = int(produced_by(task))
  local counted, produced_before = unpack(call('HMGET', task, 'deaths', 'produced_at_death'))
  local deaths = produced_before == produced and tonumber(counted or '0') + 1 or 1
  call('HSET', task, 'deaths', int(deaths), 'produced_at_death', produced)
  return deaths
end
-- Offer a task, at a higher epoch, to a role or to the worker `to` of it, which reserves a slot.
-- `happened`: it was granted or handed off. Returns the epoch.
local function offer(task, request, stage, happened, role, alone, to)
  local epoch = raise_epoch(task)
  local place = nil
  if to then
    place = {'reserved_for', to}
    call('SADD', tasks_of(to), request .. '|' .. stage)
    notify(to, 'k', 'g', 'r', request, 's', stage, 'e', epoch, 'a', alone)
  else
    local first = call('HGET', task, 'role') == role
    local entry = call('XADD', role_key(role, first), '*',
      'r', request, 's', stage, 'e', epoch, 'a', alone)
    place = {'entry', entry, 'first', first and '1' or ''}
  end
  move(task, request, stage, happened, 'role', role, 'granted_us', int(now_us()), 'alone', alone,
    unpack(place))
  count('in:' .. role)
  return epoch
end
-- Grant a task without an owner, by `offer`; `how` is added to its trace. Every grant is by this
-- function, except in a hand-off.
local function grant_task(task, request, stage, role, alone, to, how)
  local epoch = offer(task, request, stage, 'granted', role, alone, to)
  local detail = role .. (alone == '1' and ', alone' or '') .. (how or '')
  trace(request, 'granted', stage, epoch, to, detail)
  publish_event(cjson.encode({type = 'TaskGranted', request = request, stage = stage, epoch = 0})
    :gsub('"epoch":0', '"epoch":' .. epoch))
  return epoch
end
-- Return the worker if it is alive, accepts tasks of the role and has a free slot; else nil.
local function with_room(worker, role)
  local deadline = worker and call('ZSCORE', PREFIX .. 'workers', worker)
  if not deadline or tonumber(deadline) < now_us() then return nil end
  local its_role, draining, standby, capacity = unpack(
    call('HMGET', PREFIX .. 'worker:' .. worker, 'role', 'draining', 'standby', 'capacity'))
  local has_room = call('SCARD', tasks_of(worker)) < tonumber(capacity or '0')
  local accepts = its_role == role and draining ~= '1' and standby ~= '1'
  return accepts and has_room and worker or nil
end
-- Return the worker for a task's first grant: the worker that caches the session of its request, if
-- it has room; else nil. If the task stays unclaimed there, the next grant goes to the role.
local function caching_worker(request, stage, role)
  local session = call('HGET', PREFIX .. 'req:' .. request, 'session')
  return session and with_room(call('HGET', PREFIX .. 'cached_prefix:' .. session, stage), role)
end
-- Return how many chunks of an edge its consumer has acknowledged, as text; without a bound if it
-- reads no more.
local function consumed_of(request, edge, consumer)
  local consumed, state, closed = unpack(call('HMGET', task_key(request, consumer),
    'consumed:' .. edge, 'state', 'closed:' .. edge))
  return (state == 'finished' or closed) and ENDLESS or consumed or '0'
end
-- Grant a parked task again: to the worker that parked it if that has room, since what the task
-- published is there, else to its role. Tasks that are parked because this one gives them no input
-- are granted with it.
local function unpark(task, request, stage, how)
  local role, alone, parked_by, starved_stages = unpack(
    call('HMGET', task, 'role', 'alone', 'parked_by', 'starved'))
  call('HDEL', task, 'waits', 'parked_by', 'starved')
  local may_share = (alone or '') == ''
  local worker = may_share and with_room(parked_by, role) or nil
  grant_task(task, request, stage, role, alone or '', worker, how)
  for _, starved in ipairs(split(starved_stages)) do
    if call('HGET', task_key(request, starved), 'state') == 'parked' then
      unpark(task_key(request, starved), request, starved, how)
    end
  end
end
-- Grant a task again if it is parked, and every edge for which it waits has credit: its consumer
-- has acknowledged enough chunks.
local function unpark_if_due(request, stage)
  local task = task_key(request, stage)
  local state, waits = unpack(call('HMGET', task, 'state', 'waits'))
  if state ~= 'parked' then return end
  for _, wait in ipairs(split(waits)) do
    local edge, consumer, enough = string.match(wait, '^(.-)|(.-)|(%d+)$')
    if tonumber(consumed_of(request, edge, consumer)) < tonumber(enough) then return end
  end
  unpark(task, request, stage, ', which has credit')
end
-- The order of the clients whose requests wait at gateways for a place: fewest live requests by its
-- weight first, among equal ones the client whose last turn was longest ago. A client's name ends
-- in `*` and its weight, unless the weight is 1.
local TURN = 2147483648
local function turn_length(client)
  return TURN / (tonumber(string.match(client, '%*([%d.]+)$')) or 1)
end
local function turn_of(client, live)
  return int(live * turn_length(client) + math.floor(now_us() / 1000) % TURN)
end
local function num_live_of(client)
  return tonumber(call('HGET', PREFIX .. 'live:clients', client) or '0')
end
-- Add to the number of a client's live requests. A new one costs the client its turn.
local function count_live(client, change)
  local live = call('HINCRBY', PREFIX .. 'live:clients', client, change)
  if live <= 0 then call('HDEL', PREFIX .. 'live:clients', client) end
  if change > 0 then
    call('ZADD', PREFIX .. 'waiting', 'XX', turn_of(client, live), client)
  else
    call('ZADD', PREFIX .. 'waiting', 'XX', 'INCR', int(change * turn_length(client)), client)
  end
end
-- Return true if fewer clients than there are `free` places wait for an earlier turn than the
-- client's.
local function has_turn(client, free)
  local waiting = PREFIX .. 'waiting'
  if call('ZCARD', waiting) < free then return true end
  local turn = call('ZSCORE', waiting, client) or turn_of(client, num_live_of(client))
  return call('ZCOUNT', waiting, '-inf', '(' .. turn) < free
end
-- Close a request: end every right, notify every holder, give every key its time to live, as
-- submitted. Answers "ended" if it has ended.
local function close(request, state, code, message, param)
  local request_key = PREFIX .. 'req:' .. request
  if call('SREM', PREFIX .. 'live', request) == 0 then return 'ended' end
  set_state(request, state)
  local stages, edges, audio_edges, retention_s, audio_retention_s, client = unpack(
    call('HMGET', request_key,
      'stages', 'edges', 'brief', 'retention_s', 'audio_retention_s', 'share'))
  if client then count_live(client, -1) end
  call('HSET', request_key,
    'code', code, 'message', message, 'param', param, 'ended_us', int(now_us()))
  call('EXPIRE', request_key, retention_s)
  call('EXPIRE', request_key .. ':blob', audio_retention_s)
  trace(request, 'ended', '', '', '', state .. (message ~= '' and ': ' .. message or ''))
  call('EXPIRE', request_key .. ':trace', retention_s)
  local expires_us = now_us() + tonumber(retention_s) * 1000000
  call('ZADD', PREFIX .. 'index:expires', int(expires_us), request)
  prune_index()
  count('ended:' .. state)
  for _, stage in ipairs(split(stages)) do
    local task = task_key(request, stage)
    local granted = call('HGET', task, 'state') == 'granted'
    local holder = call('HGET', task, 'holder')
    remove_owner(task, request, stage)
    raise_epoch(task)
    if granted then withdraw(task, request, stage) end
    move(task, request, stage, 'closed')
    if holder and holder ~= '' then
      notify(holder, 'k', 'x', 'r', request, 's', state, 'c', code, 'm', message, 'p', param)
    end
    call('EXPIRE', task, retention_s)
    call('DEL', kv_key(request, stage))
  end
  for _, edge in ipairs(split(edges)) do
    call('EXPIRE', edge_key(request, edge), retention_s)
    call('DEL', location_key(request, edge))
  end
  for _, edge in ipairs(split(audio_edges)) do
    call('EXPIRE', edge_key(request, edge), audio_retention_s)
  end
  if audio_edges ~= '' or call('EXISTS', request_key .. ':blob') == 1 then
    local audio_expires_us = now_us() + tonumber(audio_retention_s) * 1000000
    local entry = request .. '|' .. audio_edges
    call('ZADD', PREFIX .. 'retained_audio', int(audio_expires_us), entry)
  end
  publish_event(cjson.encode(
    {type = 'RequestEnded', request = request, state = state, reason = message}))
  return 'ok'
end
-- Close the request as finished if every task has finished, the client's too: the answer was
-- delivered. To be called where a task finishes. States are compared, and not a count of open
-- tasks: a finished task may run again to recompute its tensors, and a repeated last chunk finishes
-- it twice.
local function close_if_complete(request)
  if call('HGET', task_key(request, 'client'), 'state') ~= 'finished' then return end
  for _, stage in ipairs(split(call('HGET', PREFIX .. 'req:' .. request, 'stages'))) do
    if call('HGET', task_key(request, stage), 'state') ~= 'finished' then return end
  end
  close(request, 'finished', '', '', '')
end
-- Finish a task with its last output; one that has ended stays as it is.
local function finish_task(task, request, stage, epoch, state, now)
  if not next_state('finished', state) then return end
  move(task, request, stage, 'finished', 'finished_us', now)
  local owner = remove_owner(task, request, stage)
  if state == 'running' then
    trace(request, 'finished', stage, epoch, owner)
    count_us('took:' .. stage, now - (call('HGET', task, 'claimed_us') or now))
  end
  publish_event(cjson.encode({type = 'TaskFinished', request = request, stage = stage, epoch = 0})
    :gsub('"epoch":0', '"epoch":' .. epoch))
  close_if_complete(request)
end
-- Keep what is needed to submit a request again whose task killed its workers. The oldest letters
-- are removed beyond a number and a size.
local function keep_dead_letter(request, stage, why)
  local request_key, letters_key = PREFIX .. 'req:' .. request, PREFIX .. 'dead_letters'
  local spec = call('HGET', request_key, 'spec')
  local blob = call('GET', request_key .. ':blob') or ''
  local num_bytes = #spec + #blob
  if blob ~= '' then call('SET', PREFIX .. 'dead_letter:' .. request .. ':blob', blob) end
  call('XADD', letters_key, '*', 'r', request, 's', stage, 'why', why, 'spec', spec, 'n', num_bytes)
  local letters = call('XREVRANGE', letters_key, '+', '-')
  local total_bytes = 0
  for number, letter in ipairs(letters) do
    local id, fields = unpack(letter)
    local old_request, old_num_bytes = fields[2], fields[10]  -- names and values in turn
    total_bytes = total_bytes + tonumber(old_num_bytes)
    if number > 1 and (number > MAX_DEAD or total_bytes > MAX_DEAD_BYTES) then
      call('XDEL', letters_key, id)
      call('UNLINK', PREFIX .. 'dead_letter:' .. old_request .. ':blob')
    end
  end
end
-- Fail a request whose task killed several workers, the last one (`worker`) with no other task. The
-- request becomes a dead letter.
local function condemn(request, stage, deaths, worker)
  local why = deaths .. ' workers of stage ' .. stage ..
    ' died over this request, the last one with no other task'
  call('HSET', PREFIX .. 'req:' .. request, 'failed_stage', stage)
  keep_dead_letter(request, stage, why)
  log_fact('error', 'conductor', worker, stage, request,
    'request ' .. request .. ' is a dead letter: ' .. why .. '; the last was ' ..
    (worker ~= '' and worker or 'unknown') .. '; `fleet dead-letters list` shows it')
  close(request, 'failed', 'worker_lost', why, '')
end
local function evidence_key(worker) return PREFIX .. 'gone:' .. worker .. ':tasks' end
-- Remember that the end of process `worker`, if it is observed, counts against this task: the
-- process computed for it, and is silent.
local function note_evidence(task, request, stage, worker)
  local progress = int(produced_by(task)) .. '|' .. (call('HGET', task, 'alone') or '')
  call('HSET', evidence_key(worker), request .. '|' .. stage, progress)
  call('EXPIRE', evidence_key(worker), GONE_S)
end
-- The task lost its owner. `how`: it "died", which was observed; its lease "lapsed", and it may
-- live; it "left"; a step "failed" as a whole; or the task was "revoked", or is "suspected" of a
-- death that was counted before. Raise the epoch and grant the task again to its role. Only an
-- observed death, or a failed step, counts against the task, and none if it was idle: after some
-- deaths since its last append it is a suspect, since another task of the batch may be their cause.
-- The request of a task that kills its workers alone too is condemned. The client's task is left
-- lost, until another gateway attaches. Returns true for a suspect, which is still to be granted,
-- by `grant_suspects`.
local function lose_unless_suspect(task, request, stage, how)
  local holder = call('HGET', task, 'holder') or ''
  local is_evidence = (how == 'died' or how == 'failed') and had_work(task, request)
  if how == 'lapsed' and holder ~= '' and had_work(task, request) then
    note_evidence(task, request, stage, holder)
  end
  local epoch = raise_epoch(task)
  local counted, group, role = unpack(call('HMGET', task, 'deaths', 'alone', 'role'))
  local deaths = is_evidence and count_death(task) or tonumber(counted or '0')
  local was_alone = is_evidence and group == '1'
  local died = (how == 'died' or how == 'lapsed') and {'died_worker', holder} or {}
  move(task, request, stage, 'lost', 'owner', '', unpack(died))
  trace(request, 'lost', stage, epoch, holder, how)
  local lost = {
    type = 'TaskLost', request = request, stage = stage, epoch = 0, deaths = deaths,
    alone = was_alone,
  }
  publish_event(cjson.encode(lost):gsub('"epoch":0', '"epoch":' .. epoch))
  if stage == 'client' then return false end
  if was_alone and deaths > MAX_DEATHS then
    condemn(request, stage, deaths, holder)
  elseif deaths < MAX_DEATHS then
    grant_task(task, request, stage, role, '')
  elseif is_evidence or how == 'suspected' then
    return true
  else
    grant_task(task, request, stage, role, group ~= '' and group or '1')
  end
  return false
end
local function suspects_key(group) return PREFIX .. 'suspects:' .. group end
-- Grant suspects of the same deaths, as task key, request and stage, in two halves, each to run
-- without other tasks. A half that kills its worker is divided again, so a task that kills workers
-- is found among n in log n deaths, and the others continue meanwhile.
local function grant_suspects(suspects)
  local half, id = math.ceil(#suspects / 2), int(now_us())
  for number, suspect in ipairs(suspects) do
    local task, request, stage = unpack(suspect)
    local is_in_first = number <= half
    local is_alone = (is_in_first and half or #suspects - half) == 1
    local group = is_alone and '1' or id .. (is_in_first and 'a' or 'b')
    if not is_alone then
      call('SADD', suspects_key(group), request .. '|' .. stage)
      call('EXPIRE', suspects_key(group), GONE_S)
    end
    grant_task(task, request, stage, call('HGET', task, 'role'), group)
  end
end
local function lose_owner(task, request, stage, how)
  if lose_unless_suspect(task, request, stage, how) then
    grant_suspects({{task, request, stage}})
  end
end
-- Take a granted or running task from its owner, which is notified to release it before it can read
-- the next grant itself.
local function take_back(task, request, stage)
  local epoch, state = unpack(call('HMGET', task, 'epoch', 'state'))
  if state == 'granted' then
    withdraw(task, request, stage)
    return
  end
  local owner = remove_owner(task, request, stage)
  if owner and owner ~= '' then
    notify(owner, 'k', 'y', 'r', request, 's', stage, 'e', int(tonumber(epoch) + 1))
  end
end
-- The end of process `worker` was observed: count it against the tasks for which it was silent
-- before, unless they have progressed since. A task that is a suspect from now on is taken from its
-- present owner; a request whose task ran alone is condemned.
local function settle_evidence(worker)
  local evidence, suspects = call('HGETALL', evidence_key(worker)), {}
  call('DEL', evidence_key(worker))
  for i = 1, #evidence, 2 do
    local request, stage = string.match(evidence[i], '^(.-)|(.+)$')
    local produced, group = string.match(evidence[i + 1], '^(.-)|(.*)$')
    local task = task_key(request, stage)
    local state = call('HGET', task, 'state')
    if next_state('lost', state) and int(produced_by(task)) == produced then
      local deaths = count_death(task)
      if group == '1' and deaths > MAX_DEATHS then
        condemn(request, stage, deaths, worker)
      elseif deaths >= MAX_DEATHS and (call('HGET', task, 'alone') or '') == group
        and group ~= '1' then
        suspects[#suspects + 1] = {task, request, stage}
      end
    end
  end
  for _, suspect in ipairs(suspects) do
    local task, request, stage = unpack(suspect)
    take_back(task, request, stage)
    lose_unless_suspect(task, request, stage, 'suspected')
  end
  grant_suspects(suspects)
end
-- Revoke some of the tasks of a fenced worker or gateway, which ended as `how` says: Redis serves
-- nothing else meanwhile, and a gateway may hold thousands. While some are left, it is listed in
-- `fencing`, and the leader continues (`fence_tasks`).
local function lose_tasks_of(worker, how)
  local suspects, lost = {}, call('SPOP', tasks_of(worker), FENCE_SLICE)
  table.sort(lost)  -- the oldest request first
  for _, pair in ipairs(lost) do
    local request, stage = string.match(pair, '^(.-)|(.+)$')
    local task = task_key(request, stage)
    local owner, reserved_for = unpack(call('HMGET', task, 'owner', 'reserved_for'))
    if owner == worker then
      if lose_unless_suspect(task, request, stage, how) then
        suspects[#suspects + 1] = {task, request, stage}
      end
      call('HSET', task, 'holder', '')
    elseif reserved_for == worker then
      withdraw(task, request, stage)
      lose_owner(task, request, stage, 'left')
    end
  end
  grant_suspects(suspects)
  if call('EXISTS', tasks_of(worker)) == 1 then
    call('HSET', PREFIX .. 'fencing', worker, how)
  else
    call('HDEL', PREFIX .. 'fencing', worker)
  end
end
-- Stop granting to the worker; a standby worker takes its place. Tasks reserved for it and not
-- claimed are granted to others.
local function stop_granting(worker)
  local worker_key = PREFIX .. 'worker:' .. worker
  local role, standby, draining = unpack(call('HMGET', worker_key, 'role', 'standby', 'draining'))
  call('HSET', worker_key, 'draining', '1', 'standby', '')
  index_worker(worker)
  for _, pair in ipairs(call('SMEMBERS', tasks_of(worker))) do
    local request, stage = string.match(pair, '^(.-)|(.+)$')
    local task = task_key(request, stage)
    if call('HGET', task, 'reserved_for') == worker then
      withdraw(task, request, stage)
      lose_owner(task, request, stage, 'left')
    end
  end
  if role and standby ~= '1' and draining ~= '1' then promote(role) end
end
-- Return how many more tasks each of `roles` may be granted now, so that its workers soon claim
-- them: tasks are claimed in the order of their grants, whoever's they are.
local MAX_UNCLAIMED = 16
local function num_claimed_soon(roles, live)
  local soon = {}
  for i, role in ipairs(roles) do
    local new_grants = PREFIX .. 'role:' .. role
    local unclaimed = live >= MAX_UNCLAIMED and call('XLEN', new_grants) or 0
    soon[i] = MAX_UNCLAIMED - unclaimed
  end
  return soon
end
-- Return the answer for a request that is refused, nil if it is admitted: each of `roles` must have
-- or expect a worker, and fewer than `bound` requests be live. A request that `waits` until it is
-- admitted must have its turn too ("turn"), and workers that soon claim its tasks ("soon"). The
-- refusal of another one is logged, at most once in some seconds: a flood of requests must not fill
-- the log. A refusal for a role is logged by the gateway, which may call again.
local function admission_refusal(request, gateway, bound, roles, grace_us, client, waits)
  local wanted, missing, retry_us = roles ~= '' and split(roles) or {}, {}, 0
  for i, found in ipairs(availability(wanted, tonumber(grace_us))) do
    if not found.admits then
      missing[#missing + 1] = wanted[i]
      retry_us = math.max(retry_us, found.retry_us)
    end
  end
  if #missing > 0 then return {'no_worker', int(retry_us), unpack(missing)} end
  local live = call('SCARD', PREFIX .. 'live')
  local free = tonumber(bound) - live
  if waits == 'soon' then free = math.min(free, unpack(num_claimed_soon(wanted, live))) end
  if free > 0 and (waits == '' or has_turn(client, free)) then return nil end
  if waits == '' and call('SET', PREFIX .. 'refusal_logged', request, 'NX', 'EX', REFUSING_S) then
    log_line('warning', 'web', gateway, '', request,
      'request ' .. request .. ' is refused: ' .. live .. ' requests are live, and ' ..
      'limits.max_requests allows ' .. bound .. '; more such refusals within ' .. REFUSING_S ..
      ' s are not logged')
  end
  return {'full', live}
end
-- Write a request with its tasks: the client's, held by `gateway` at the epoch that is written
-- already, and one per stage, each granted to its first role: later stages wait, warm, before there
-- is input. `what` is added to the trace. `written`: spec, blob, stages, edges, outputs, event,
-- session, kind and model (shown in the index of requests), edges of audio (retained for less long
-- than the others), retention s, audio's retention s, first role of each stage, client.
local function begin_request(request, gateway, what, written)
  local spec, blob, stages, edges, outputs, event, session, kind, model, audio_edges, retention_s,
    audio_retention_s, first_roles, client = unpack(written)
  local request_key, client_task = PREFIX .. 'req:' .. request, task_key(request, 'client')
  call('HSET', request_key, 'spec', spec, 'created_us', int(now_us()),
    'stages', stages .. ',client', 'edges', edges, 'outputs', outputs, 'kind', kind, 'model', model,
    'brief', audio_edges, 'retention_s', retention_s, 'audio_retention_s', audio_retention_s,
    'share', client)
  set_state(request, 'submitted')
  call('ZADD', PREFIX .. 'index:all', 0, request)
  if session ~= '' then call('HSET', request_key, 'session', session) end
  if blob ~= '' then call('SET', request_key .. ':blob', blob) end
  move(client_task, request, 'client', 'attached', 'owner', gateway, 'holder', gateway)
  call('SADD', tasks_of(gateway), request .. '|client')
  call('SADD', PREFIX .. 'live', request)
  count_live(client, 1)
  trace(request, what, '', '', gateway)
  publish_event(event)
  local roles = split(first_roles)
  for i, stage in ipairs(split(stages)) do
    local worker = session ~= '' and caching_worker(request, stage, roles[i]) or nil
    grant_task(task_key(request, stage), request, stage, roles[i], '', worker)
  end
end
