-- Definitions of the scripts, each of which contains the definitions that it uses (`lua_source.py`). P is the key prefix; all times are Redis's own, in microseconds.
-- `task_moves` and `request_moves`, which precede these definitions, are written by `lua_source.py` from the tables in `fleet/conductor/states.py`.
local P = '{fleet}:'
local call = redis.call
local MAX_EVENTS, MAX_INBOX, MAX_DEAD, MAX_DEAD_BYTES = 20000, 200000, 1000, 67108864
local MAX_LOGS, MAX_FACTS, MAX_NAMED_TASKS = 20000, 10000, 60
local MAX_INDEX, MAX_TRACE_EVENTS, MAX_GONE, GONE_S = 20000, 400, 200, 600
local SERIES_STEP_US, SERIES_KEPT_S = 5000000, 1000
local OVERDUE_SLICE = 100
local ENDLESS = '9000000000000000'
local MAX_FAILED_STARTS, USUAL_START_US, FORGET_TRIES_US = 3, 5000000, 60000000
local MAX_START_US, FENCE_SLICE, SWEEP_SLICE = 120000000, 50, 50
-- Deaths over a task without progress before it runs alone: until then, another task of the batch may be the cause. Beyond that number a
-- death alone condemns the request.
local MAX_DEATHS = 2
local REFUSING_S, VOICE_ENDED_MS = 10, 600000
local REFUSED_KEPT_S, MAX_REFUSED = 3600, 100

local function now_us()
  local t = call('TIME')
  return tonumber(t[1]) * 1000000 + tonumber(t[2])
end
-- Let this script run although Redis's memory is full: Redis compares `maxmemory` only before the first write of a script, and not
-- before a deletion. To be called before any other write, by scripts that free, end or keep what exists; scripts that add work are
-- refused as a whole. The key never exists.
local function pass_when_full() call('DEL', P .. 'none') end
local function int(n) return string.format('%.0f', n) end
local function task_key(r, s) return P .. 'req:' .. r .. ':task:' .. s end
local function edge_key(r, e) return P .. 'req:' .. r .. ':edge:' .. e end
local function loc_key(r, e) return P .. 'req:' .. r .. ':loc:' .. e end
local function kv_key(r, s) return P .. 'req:' .. r .. ':kv:' .. s end
local function tasks_of(w) return P .. 'worker:' .. w .. ':tasks' end
local function event(json) call('XADD', P .. 'events', 'MAXLEN', '~', MAX_EVENTS, '*', 'e', json) end
local function notice(w, ...)
  -- An unlisted worker has no inbox; a new one would be a key without an end.
  call('XADD', P .. 'inbox:' .. w, 'NOMKSTREAM', 'MAXLEN', '~', MAX_INBOX, '*', ...)
end
-- The news of one call for the same process are one entry of its inbox, whose fields are numbered: 'h' a chunk's header, 'p' a chunk to
-- be read from its log (request|edge|index), 'l' where the tensors of the chunk before are, 'a' credit (request|edge|chunks consumed).
-- Only a header of at most `MAX_NOTICE_HEADER` bytes is in the inbox too: to read a short one costs more than to write it twice.
local MAX_NOTICE_HEADER, MAX_NEWS = 256, 400
local news = {}
local function send_news()
  for w, fields in pairs(news) do notice(w, 'k', 'n', unpack(fields)) end
  news = {}
end
local function add_news(w, kind, value)
  if news[w] and #news[w] > MAX_NEWS and kind ~= 'l' then send_news() end
  local fields = news[w] or {}
  local n = #fields
  news[w], fields[n + 1], fields[n + 2] = fields, kind .. n, value
end
-- Log to the fleet's log in the script that decides what the line says. Returns the entry's id and fields.
local function log_line(level, process, w, s, r, message)
  local fields = {'t', int(now_us()), 'l', level, 'n', 'fleet.control', 'p', process,
    'w', w or '', 's', s or '', 'r', r or '', 'm', message}
  return call('XADD', P .. 'logs', 'MAXLEN', '~', MAX_LOGS, '*', unpack(fields)), fields
end
-- Log a fact of the fleet in the script that writes it: once per fact, whichever processes see it. It is kept apart too, since lines
-- that clients cause may trim it from the log; under the same id, so that a reader can continue in one list where the other ends.
local function log_fact(...)
  local id, fields = log_line(...)
  -- The id is refused if the log was deleted, and Redis's clock set back: then any id is better than none.
  for _, as in ipairs({id, '*'}) do
    if type(redis.pcall('XADD', P .. 'logs:facts', 'MAXLEN', '~', MAX_FACTS, as, unpack(fields))) ~= 'table' then break end
  end
end
-- Return the tasks that a worker or gateway holds, as text, and their request if all are of the same one.
local function held_by(w)
  local named, pairs_held, request = {}, call('SMEMBERS', tasks_of(w)), nil
  table.sort(pairs_held)
  for number, pair in ipairs(pairs_held) do
    local r, s = string.match(pair, '^(.-)|(.+)$')
    if number <= MAX_NAMED_TASKS then named[number] = r .. ' (' .. s .. ')' end
    request = (number == 1 or request == r) and r or ''
  end
  if #named == 0 then return 'nothing', '' end
  local more = #pairs_held > #named and ' and ' .. #pairs_held - #named .. ' more' or ''
  return table.concat(named, ', ') .. more, request
end
-- Return the labels `process` and `stage` of a log line about a worker of the role; a gateway has none.
local function labels_of(role)
  if role == '' then return 'web', '' end
  return 'worker', string.match(role, '^[^.]+')
end
-- Append an event to the trace of a known request. No script decides by the trace.
local function trace(r, what, s, epoch, w, detail)
  local key = P .. 'req:' .. r .. ':trace'
  local line = int(now_us()) .. '|' .. what .. '|' .. s .. '|' .. (epoch or '') .. '|' .. (w or '') .. '|' .. (detail or '')
  if call('RPUSH', key, line) > MAX_TRACE_EVENTS then call('LTRIM', key, -MAX_TRACE_EVENTS, -1) end
end
-- Add one to a field of the present step of the fleet's time series.
local function count(field)
  local key = P .. 'series:' .. int(math.floor(now_us() / SERIES_STEP_US))
  if call('HINCRBY', key, field, 1) == 1 then call('EXPIRE', key, SERIES_KEPT_S) end
end
-- Count a duration in its bucket, by the bounds of `fleet.telemetry.counts`.
local function count_us(field, us)
  count(field .. ':' .. int(math.max(0, math.min(100, math.ceil(20 * math.log(math.max(us, 1) / 100) / math.log(10))))))
end
-- Set the request's state in its hash and in the index, which only orders.
local function set_state(r, state)
  local rk = P .. 'req:' .. r
  local was = call('HGET', rk, 'state')
  if was == state then return end
  assert(request_moves()[was or ''][state], 'a ' .. (was or 'new') .. ' request cannot be ' .. state)
  if was then call('ZREM', P .. 'index:' .. was, r) end
  call('HSET', rk, 'state', state)
  call('ZADD', P .. 'index:' .. state, 0, r)
end
-- Remove expired requests from the index, and the oldest ended ones beyond its bound.
local function prune_index()
  local expires = P .. 'index:expires'
  local due = call('ZRANGEBYSCORE', expires, '-inf', int(now_us()), 'LIMIT', 0, 20)
  if #due == 0 and call('ZCARD', P .. 'index:all') > MAX_INDEX then due = call('ZRANGE', expires, 0, 19) end
  for _, old in ipairs(due) do
    for _, of in ipairs({'expires', 'all', 'finished', 'failed', 'aborted'}) do call('ZREM', P .. 'index:' .. of, old) end
  end
end
local STATUSES = {'accepting', 'leaving', 'ordered_off', 'standby'}
local function role_workers_key(role, status) return P .. 'role_workers:' .. role .. ':' .. status end
local function settings_group_key(group) return P .. 'settings_group:' .. group end
-- Return the status under which a worker is indexed: "leaving" drains by its own decision, "ordered_off" by an operator's order.
local function status_of(standby, draining, ordered_off)
  if standby == '1' then return 'standby' end
  if ordered_off == '1' then return 'ordered_off' end
  return draining == '1' and 'leaving' or 'accepting'
end
-- Set a worker's place in the indexes of listed workers: with its lease deadline in the set of its role and status and in the set of its
-- settings, in none once it is unlisted. Every script that lists it or changes these fields of its hash calls this after.
local function index_worker(w)
  local is = call('HMGET', P .. 'worker:' .. w, 'role', 'standby', 'draining', 'ordered_off', 'settings_group')
  local deadline = call('ZSCORE', P .. 'workers', w)
  if is[1] and is[1] ~= '' then
    local present = deadline and status_of(is[2], is[3], is[4])
    for _, status in ipairs(STATUSES) do
      if status == present then call('ZADD', role_workers_key(is[1], status), deadline, w)
      else call('ZREM', role_workers_key(is[1], status), w) end
    end
  end
  local group = is[5]
  if not group then return end
  if deadline then
    call('ZADD', settings_group_key(group), deadline, w)
    call('SADD', P .. 'settings_groups', group)
  else
    call('ZREM', settings_group_key(group), w)
    if call('EXISTS', settings_group_key(group)) == 0 then call('SREM', P .. 'settings_groups', group) end
  end
end
-- Return the place (host:pid) in a worker's id; nil for an id without one.
local function place_of(w) return string.match(w, '@([^:]*:[^:]*):') end
-- Let a standby worker accept tasks.
local function end_standby(w)
  call('HSET', P .. 'worker:' .. w, 'standby', '')
  index_worker(w)
  notice(w, 'k', 'p')
end
-- Let a standby worker of the role accept tasks, if there is one: the one with the longest lease is surely alive.
local function promote(role)
  local w = call('ZREVRANGEBYSCORE', role_workers_key(role, 'standby'), '+inf', int(now_us()), 'LIMIT', 0, 1)[1]
  if w then end_standby(w) end
end
local function availability_key(role) return P .. 'availability:' .. role end
-- Return until when an announced start counts (us), the number of a keeper's start ("" for a process), and the percentage of its
-- weights that is loaded (nil unknown).
local function start_of(value)
  local ends, number, loaded = string.match(value, '^(%d+) ?(%d*) ?(%d*)$')
  return tonumber(ends), number, tonumber(loaded)
end
-- Withdraw the announced start at `place`. A start that did not fail is no try.
local function withdraw_start(key, place, failed)
  if call('HDEL', key, 'start:' .. place) == 0 then return false end
  if not failed and tonumber(call('HGET', key, 'tries') or '0') > 0 then call('HINCRBY', key, 'tries', -1) end
  return true
end
-- Return the latest lease deadline (us) of a role's workers of these statuses; 0 without one.
local function latest_deadline(role, ...)
  local latest = 0
  for _, status in ipairs({...}) do
    local top = call('ZREVRANGE', role_workers_key(role, status), 0, 0, 'WITHSCORES')
    latest = math.max(latest, tonumber(top[2] or '0'))
  end
  return latest
end
-- Return the announced starts and losses of a role, and until when they alone let it admit requests. Announced starts are ignored
-- once too many have failed in a row, and times far in the future are (Redis's clock may have been set back).
local function announced(role, grace_us, now)
  local of, starting, starting_until, most_loaded = {}, 0, 0, nil
  local fields = call('HGETALL', availability_key(role))
  for i = 1, #fields, 2 do
    if string.sub(fields[i], 1, 6) ~= 'start:' then
      of[fields[i]] = tonumber(fields[i + 1])
    else
      local ends, _, loaded = start_of(fields[i + 1])
      if ends > now and ends <= now + MAX_START_US then
        starting, starting_until = starting + 1, math.max(starting_until, ends)
        if loaded then most_loaded = math.max(most_loaded or 0, loaded) end
      end
    end
  end
  if (of.tries or 0) - starting >= MAX_FAILED_STARTS * (of.workers or 1) then
    starting, starting_until, most_loaded = 0, 0, nil
  end
  for _, name in ipairs({'lost_us', 'left_us'}) do
    if (of[name] or 0) > now + grace_us then of[name] = nil end
  end
  of.loaded = most_loaded
  of.starting, of.admits_until = starting, math.max((of.lost_us or 0) + grace_us, starting_until)
  return of
end
-- The one rule by which roles expect a worker, for each of `roles` in order. New requests are admitted (`admits`) while the role has
-- a worker that serves, had its last one less than `grace_us` ago, or has one starting. A worker that was ordered to drain or stop
-- does not count; one that leaves by its own decision does, since it is started again. Requests in flight are kept (`keeps`) on the
-- same terms, and for `grace_us` after a worker was ordered to drain or stop. `starting` counts the starts, and the
-- most advanced of them has `loaded` per cent of its weights (nil unknown); `retry_us` is the time until a retry, estimated from the
-- duration of the last start.
local function availability(roles, grace_us)
  local now, out = now_us(), {}
  for i, role in ipairs(roles) do
    local of = announced(role, grace_us, now)
    local serving = latest_deadline(role, 'accepting', 'leaving')
    local present = math.max(serving, latest_deadline(role, 'ordered_off', 'standby'), of.left_us or 0)
    local admits = math.max(serving + grace_us, of.admits_until) > now
    out[i] = {
      admits = admits,
      keeps = admits or present + grace_us > now,
      starting = of.starting,
      loaded = of.loaded,
      retry_us = math.max((of.next_us or 0) - now, 0) + (of.took_us or USUAL_START_US),
    }
  end
  return out
end
-- Return the state of a task in `state` (nil: it was never granted) after what happened to it; nil if the table forbids that.
local function next_state(happened, state) return task_moves()[happened][state or ''] end
-- Change a task's state by what happened to it, and its place in the indexes that the conductor queries: unclaimed grants, and requests
-- without a gateway. Every write of a task's state is by this function. A move that the table forbids is an error; a script that may
-- meet one compares with `next_state` before its first write.
local function move(tk, r, s, happened)
  local state = call('HGET', tk, 'state') or ''
  local to = next_state(happened, state)
  assert(to, 'a task that is ' .. (state ~= '' and state or 'new') .. ' cannot be ' .. happened)
  call('HSET', tk, 'state', to)
  if to == 'granted' then call('ZADD', P .. 'granted', int(now_us()), r .. '|' .. s)
  elseif state == 'granted' then call('ZREM', P .. 'granted', r .. '|' .. s) end
  if s ~= 'client' then return end
  if to == 'lost' then call('ZADD', P .. 'without_gateway', int(now_us()), r)
  elseif state == 'lost' then call('ZREM', P .. 'without_gateway', r) end
end
-- Return why the owner of the task at this epoch may not write; nil if the task runs at this epoch and its request is live.
local function refusal_of(tk, r, epoch)
  local t = call('HMGET', tk, 'epoch', 'state')
  if t[1] ~= epoch then return 'stale' end
  if call('SISMEMBER', P .. 'live', r) == 0 then return 'ended' end
  return t[2] ~= 'running' and 'stale' or nil
end
-- Return why the owner of the task at this epoch can import no blocks ("released": none are offered); else nil and the worker that offers
-- them.
local function refused_offer(r, s, epoch)
  if call('HGET', task_key(r, s), 'epoch') ~= epoch then return 'stale' end
  if call('SISMEMBER', P .. 'live', r) == 0 then return 'ended' end
  local kv = call('HMGET', kv_key(r, s), 'state', 'source')
  if kv[1] ~= 'offered' then return 'released' end
  return nil, kv[2]
end
-- Return true if an epoch is below another epoch, as text. An epoch above Redis's proves that Redis lost the write that raised it.
local function is_older(epoch, other) return tonumber(epoch) < tonumber(other or '0') end
-- Return why a worker may not write to the records of training, nil if it may: it must be listed and not stand by, and, where it names an
-- epoch, have the right to train at that epoch. An operator ("") may.
local function training_refusal(w, epoch)
  if w == '' then return nil end
  if not call('ZSCORE', P .. 'workers', w) or call('HGET', P .. 'worker:' .. w, 'standby') == '1' then return 'unlisted' end
  local of = call('HMGET', P .. 'training', 'trainer', 'epoch')
  if epoch ~= '' and (of[1] ~= w or of[2] ~= epoch) then return 'stale' end
end
-- Return the number in the record of a version of the draft head; "0" without a record, as for the head of the start.
local function number_of_version(record) return string.match(record or '', '"number":(%d+)') or '0' end
local function is_leader(value) return call('GET', P .. 'conductor') == value end
-- Raise an epoch above its former value, the time of Redis, and `seen` ("" none): an epoch that a holder has and Redis lost.
local function raise_epoch(tk, seen)
  local former, now = math.max(tonumber(call('HGET', tk, 'epoch') or '0'), tonumber(seen or '') or 0), now_us()
  -- Redis may lose its last writes, and must not issue their epochs again. The time differs; behind a clock that was set back, its
  -- part below a second.
  local e = now > former and now or former + 1 + now % 1000000
  call('HSET', tk, 'epoch', int(e))
  return int(e)
end
local function remove_owner(tk, r, s)
  local owner = call('HGET', tk, 'owner')
  if owner and owner ~= '' then call('SREM', tasks_of(owner), r .. '|' .. s) end
  call('HSET', tk, 'owner', '')
  return owner
end
-- The key of one of a role's two streams of grants; the task's field `first` says in which its entry is. A task waits in the first if
-- it was granted to the role before: it has begun, or its turn had come. Workers empty it before the other (`read_grants`).
local function role_key(role, first) return P .. 'role:' .. role .. (first and ':first' or '') end
local function delete_entry(tk)
  local of = call('HMGET', tk, 'role', 'entry', 'first')
  if of[1] and of[2] then call('XDEL', role_key(of[1], of[3] == '1'), of[2]) end
end
-- Return the id of the last entry of a role's stream that was read as a grant.
local function last_read(key)
  for _, group in ipairs(redis.pcall('XINFO', 'GROUPS', key)) do
    local of = {}
    for f = 1, #group, 2 do of[group[f]] = group[f + 1] end
    if of.name == 'workers' then return of['last-delivered-id'] end
  end
  return '0-0'
end
-- Withdraw an unclaimed grant from its stream, and from the worker that reserves a slot for it.
local function withdraw(tk, r, s)
  local reserved_for = call('HGET', tk, 'reserved_for')
  if reserved_for then
    call('SREM', tasks_of(reserved_for), r .. '|' .. s)
    call('HDEL', tk, 'reserved_for')
  end
  delete_entry(tk)
end
local function voices_of(owner) return P .. 'voices_of:' .. owner end
-- Renew a voice session's time to live. A client secret's sessions are also listed under that secret with the same time: a session
-- whose gateway stopped renewing it is not counted, and the list ends with the last of them.
local function list_voice(session, owner, ttl_ms)
  local ends = int(now_us() + tonumber(ttl_ms) * 1000)
  call('PEXPIRE', P .. 'voice:' .. session, ttl_ms)
  call('ZADD', P .. 'voices', ends, session)
  call('ZREMRANGEBYSCORE', P .. 'voices', '-inf', int(now_us()))
  if owner == '' then return end
  local of = voices_of(owner)
  call('ZREMRANGEBYSCORE', of, '-inf', int(now_us()))
  call('ZADD', of, ends, session)
  if call('PTTL', of) < tonumber(ttl_ms) then call('PEXPIRE', of, ttl_ms) end
end
-- Delete a voice session and record its end.
local function forget_voice(session, owner, by_operator)
  call('SET', P .. 'voice_ended:' .. session, by_operator and '1' .. owner or '0', 'PX', VOICE_ENDED_MS)
  call('DEL', P .. 'voice:' .. session)
  call('ZREM', P .. 'voices', session)
  if owner ~= '' then call('ZREM', voices_of(owner), session) end
end
local function split(text)
  local out = {}
  for word in string.gmatch(text or '', '[^,]+') do out[#out + 1] = word end
  return out
end
-- Return true if the task's owner may have been working on it: on a chunk beyond those consumed when it last reported idle, or, for a
-- task without inputs, on the request itself.
local function had_work(tk, r)
  local inputs = split(call('HGET', tk, 'inputs'))
  for _, e in ipairs(inputs) do
    if call('XLEN', edge_key(r, e)) > tonumber(call('HGET', tk, 'idle_consumed:' .. e) or '0') then return true end
  end
  return #inputs == 0
end
-- Return the number of chunks that a task has appended.
local function produced_by(tk)
  local produced, fields = 0, call('HGETALL', tk)
  for i = 1, #fields, 2 do
    if string.sub(fields[i], 1, 9) == 'produced:' then produced = produced + tonumber(fields[i + 1]) end
  end
  return produced
end
-- Count a death over a task; return the number of deaths since its last append.
local function count_death(tk)
  local produced = int(produced_by(tk))
  local before = call('HMGET', tk, 'deaths', 'produced_at_death')
  local deaths = before[2] == produced and tonumber(before[1] or '0') + 1 or 1
  call('HSET', tk, 'deaths', int(deaths), 'produced_at_death', produced)
  return deaths
end
-- Offer a task, at a higher epoch, to a role or to the worker `to` of it, which reserves a slot. `happened`: it was granted or handed off.
-- Returns the epoch.
local function offer(tk, r, s, happened, role, alone, to)
  local epoch, first = raise_epoch(tk), call('HGET', tk, 'role') == role
  if to then
    call('HSET', tk, 'reserved_for', to)
    call('SADD', tasks_of(to), r .. '|' .. s)
    notice(to, 'k', 'g', 'r', r, 's', s, 'e', epoch, 'a', alone)
  else
    local entry = call('XADD', role_key(role, first), '*', 'r', r, 's', s, 'e', epoch, 'a', alone)
    call('HSET', tk, 'entry', entry, 'first', first and '1' or '')
  end
  move(tk, r, s, happened)
  call('HSET', tk, 'role', role, 'granted_us', int(now_us()), 'alone', alone)
  count('in:' .. role)
  return epoch
end
-- Grant a task without an owner, by `offer`; `how` is added to its trace. Every grant is by this function, except in a hand-off.
local function grant_task(tk, r, s, role, alone, to, how)
  local epoch = offer(tk, r, s, 'granted', role, alone, to)
  trace(r, 'granted', s, epoch, to, role .. (alone == '1' and ', alone' or '') .. (how or ''))
  event(cjson.encode({type = 'TaskGranted', request = r, stage = s, epoch = 0}):gsub('"epoch":0', '"epoch":' .. epoch))
  return epoch
end
-- Return the worker if it is alive, accepts tasks of the role and has a free slot; else nil.
local function with_room(w, role)
  local deadline = w and call('ZSCORE', P .. 'workers', w)
  if not deadline or tonumber(deadline) < now_us() then return nil end
  local is = call('HMGET', P .. 'worker:' .. w, 'role', 'draining', 'standby', 'capacity')
  local has_room = call('SCARD', tasks_of(w)) < tonumber(is[4] or '0')
  return is[1] == role and is[2] ~= '1' and is[3] ~= '1' and has_room and w or nil
end
-- Return the worker for a task's first grant: the worker that caches the session of its request, if it has room; else nil. If the task
-- stays unclaimed there, the next grant goes to the role.
local function caching_worker(r, s, role)
  local session = call('HGET', P .. 'req:' .. r, 'session')
  return session and with_room(call('HGET', P .. 'cached_prefix:' .. session, s), role)
end
-- Return how many chunks of an edge its consumer has acknowledged, as text; without a bound if it reads no more.
local function consumed_of(r, e, consumer)
  local c = call('HMGET', task_key(r, consumer), 'consumed:' .. e, 'state', 'closed:' .. e)
  return (c[2] == 'finished' or c[3]) and ENDLESS or c[1] or '0'
end
-- Grant a parked task again: to the worker that parked it if that has room, since what the task published is there, else to its role.
-- Tasks that are parked because this one gives them no input are granted with it, unless one has parked since, for credit of its own.
local function unpark(tk, r, s, how)
  local t = call('HMGET', tk, 'role', 'alone', 'parked_by', 'starved')
  call('HDEL', tk, 'waits', 'parked_by', 'starved')
  local alone = t[2] or ''
  grant_task(tk, r, s, t[1], alone, alone == '' and with_room(t[3], t[1]) or nil, how)
  for _, starved in ipairs(split(t[4])) do
    local of = call('HMGET', task_key(r, starved), 'state', 'waits')
    if of[1] == 'parked' and not of[2] then unpark(task_key(r, starved), r, starved, how) end
  end
end
-- Grant a task again if it is parked, and every edge for which it waits has credit: its consumer has acknowledged enough chunks.
local function unpark_if_due(r, s)
  local tk = task_key(r, s)
  local t = call('HMGET', tk, 'state', 'waits')
  if t[1] ~= 'parked' then return end
  for _, wait in ipairs(split(t[2])) do
    local e, consumer, enough = string.match(wait, '^(.-)|(.-)|(%d+)$')
    if tonumber(consumed_of(r, e, consumer)) < tonumber(enough) then return end
  end
  unpark(tk, r, s, ', which has credit')
end
-- The order of the clients whose requests wait at gateways for a place: fewest live requests by its weight first, among equal ones the
-- client whose last turn was longest ago. A client's name ends in `*` and its weight, unless the weight is 1.
local TURN = 2147483648
local function turn_length(client) return TURN / (tonumber(string.match(client, '%*([%d.]+)$')) or 1) end
local function turn_of(client, live) return int(live * turn_length(client) + math.floor(now_us() / 1000) % TURN) end
local function num_live_of(client) return tonumber(call('HGET', P .. 'live:clients', client) or '0') end
-- Add to the number of a client's live requests. A new one costs the client its turn.
local function count_live(client, by)
  local live = call('HINCRBY', P .. 'live:clients', client, by)
  if live <= 0 then call('HDEL', P .. 'live:clients', client) end
  if by > 0 then call('ZADD', P .. 'waiting', 'XX', turn_of(client, live), client)
  else call('ZADD', P .. 'waiting', 'XX', 'INCR', int(by * turn_length(client)), client) end
end
-- Return true if fewer clients than there are `free` places wait for an earlier turn than the client's.
local function has_turn(client, free)
  if call('ZCARD', P .. 'waiting') < free then return true end
  local turn = call('ZSCORE', P .. 'waiting', client) or turn_of(client, num_live_of(client))
  return call('ZCOUNT', P .. 'waiting', '-inf', '(' .. turn) < free
end
-- Close request r: end every right, notify every holder, give every key its time to live, as submitted. Answers "ended" if it has ended.
local function close(r, state, code, message, param)
  local rk = P .. 'req:' .. r
  if call('SREM', P .. 'live', r) == 0 then return 'ended' end
  set_state(r, state)
  local of = call('HMGET', rk, 'stages', 'edges', 'brief', 'retention_s', 'audio_retention_s', 'share')
  if of[6] then count_live(of[6], -1) end
  local brief, retention_s, brief_s = of[3], of[4], of[5]
  call('HSET', rk, 'code', code, 'message', message, 'param', param, 'ended_us', int(now_us()))
  call('EXPIRE', rk, retention_s)
  call('EXPIRE', rk .. ':blob', brief_s)
  trace(r, 'ended', '', '', '', state .. (message ~= '' and ': ' .. message or ''))
  call('EXPIRE', rk .. ':trace', retention_s)
  call('ZADD', P .. 'index:expires', int(now_us() + tonumber(retention_s) * 1000000), r)
  prune_index()
  count('ended:' .. state)
  for _, s in ipairs(split(of[1])) do
    local tk = task_key(r, s)
    local granted = call('HGET', tk, 'state') == 'granted'
    local holder = call('HGET', tk, 'holder')
    remove_owner(tk, r, s)
    raise_epoch(tk)
    if granted then withdraw(tk, r, s) end
    move(tk, r, s, 'closed')
    if holder and holder ~= '' then notice(holder, 'k', 'x', 'r', r, 's', state, 'c', code, 'm', message, 'p', param) end
    call('EXPIRE', tk, retention_s)
    call('DEL', kv_key(r, s))
  end
  for _, e in ipairs(split(of[2])) do
    call('EXPIRE', edge_key(r, e), retention_s)
    call('DEL', loc_key(r, e))
  end
  for _, e in ipairs(split(brief)) do call('EXPIRE', edge_key(r, e), brief_s) end
  if brief ~= '' or call('EXISTS', rk .. ':blob') == 1 then
    call('ZADD', P .. 'retained_audio', int(now_us() + tonumber(brief_s) * 1000000), r .. '|' .. brief)
  end
  event(cjson.encode({type = 'RequestEnded', request = r, state = state, reason = message}))
  return 'ok'
end
-- Close the request as finished if every task has finished, the client's too: the answer was delivered. To be called where a task
-- finishes. States are compared, and not a count of open tasks: a finished task may run again to recompute its tensors, and a repeated
-- last chunk finishes it twice.
local function close_if_complete(r)
  if call('HGET', task_key(r, 'client'), 'state') ~= 'finished' then return end
  for _, s in ipairs(split(call('HGET', P .. 'req:' .. r, 'stages'))) do
    if call('HGET', task_key(r, s), 'state') ~= 'finished' then return end
  end
  close(r, 'finished', '', '', '')
end
-- Keep what is needed to submit a request again whose task killed its workers. The oldest letters are removed beyond a number and a size.
local function keep_dead_letter(r, stage, why)
  local spec, blob = call('HGET', P .. 'req:' .. r, 'spec'), call('GET', P .. 'req:' .. r .. ':blob') or ''
  local bytes = #spec + #blob
  if blob ~= '' then call('SET', P .. 'dead_letter:' .. r .. ':blob', blob) end
  call('XADD', P .. 'dead_letters', '*', 'r', r, 's', stage, 'why', why, 'spec', spec, 'n', bytes)
  local letters, num, total = call('XREVRANGE', P .. 'dead_letters', '+', '-'), 0, 0
  for _, letter in ipairs(letters) do
    local of = letter[2]  -- field names and values in turn
    num, total = num + 1, total + tonumber(of[10])
    if num > 1 and (num > MAX_DEAD or total > MAX_DEAD_BYTES) then
      call('XDEL', P .. 'dead_letters', letter[1])
      call('UNLINK', P .. 'dead_letter:' .. of[2] .. ':blob')
    end
  end
end
-- Fail a request whose task killed several workers, the last one (`w`) with no other task. The request becomes a dead letter.
local function condemn(r, s, deaths, w)
  local why = deaths .. ' workers of stage ' .. s .. ' died over this request, the last one with no other task'
  call('HSET', P .. 'req:' .. r, 'failed_stage', s)
  keep_dead_letter(r, s, why)
  log_fact('error', 'conductor', w, s, r, 'request ' .. r .. ' is a dead letter: ' .. why .. '; the last was ' ..
    (w ~= '' and w or 'unknown') .. '; `fleet dead-letters list` shows it')
  close(r, 'failed', 'worker_lost', why, '')
end
local function evidence_key(w) return P .. 'gone:' .. w .. ':tasks' end
-- Remember that the end of process `w`, if it is observed, counts against this task: w computed for it, and is silent.
local function note_evidence(tk, r, s, w)
  call('HSET', evidence_key(w), r .. '|' .. s, int(produced_by(tk)) .. '|' .. (call('HGET', tk, 'alone') or ''))
  call('EXPIRE', evidence_key(w), GONE_S)
end
-- The task lost its owner. `how`: it "died", which was observed; its lease "lapsed", and it may live; it "left"; a step "failed" as a whole;
-- or the task was "revoked", or is "suspected" of a death that was counted before. Raise the epoch and grant the task again to its role. Only an observed death, or a failed step, counts
-- against the task, and none if it was idle: after some deaths since its last append it is a suspect, since another task of the batch may
-- be their cause. The request of a task that kills its workers alone too is condemned. The client's task is left lost, until another
-- gateway attaches. Returns true for a suspect, which is still to be granted, by `grant_suspects`.
local function lose_unless_suspect(tk, r, s, how)
  local holder = call('HGET', tk, 'holder') or ''
  local is_evidence = (how == 'died' or how == 'failed') and had_work(tk, r)
  if how == 'lapsed' and holder ~= '' and had_work(tk, r) then note_evidence(tk, r, s, holder) end
  local epoch, before = raise_epoch(tk), call('HMGET', tk, 'deaths', 'alone', 'role')
  local deaths = is_evidence and count_death(tk) or tonumber(before[1] or '0')
  local alone = is_evidence and before[2] == '1'
  move(tk, r, s, 'lost')
  call('HSET', tk, 'owner', '')
  if how == 'died' or how == 'lapsed' then call('HSET', tk, 'died_worker', holder) end
  trace(r, 'lost', s, epoch, holder, how)
  event(cjson.encode({type = 'TaskLost', request = r, stage = s, epoch = 0, deaths = deaths, alone = alone})
    :gsub('"epoch":0', '"epoch":' .. epoch))
  if s == 'client' then return false end
  if alone and deaths > MAX_DEATHS then condemn(r, s, deaths, holder)
  elseif deaths < MAX_DEATHS then grant_task(tk, r, s, before[3], '')
  elseif is_evidence or how == 'suspected' then return true
  else grant_task(tk, r, s, before[3], before[2] ~= '' and before[2] or '1') end
  return false
end
local function suspects_key(group) return P .. 'suspects:' .. group end
-- Grant suspects of the same deaths, as task key, request and stage, in two halves, each to run without other tasks. A half that kills its
-- worker is divided again, so a task that kills workers is found among n in log n deaths, and the others continue meanwhile.
local function grant_suspects(suspects)
  local half, id = math.ceil(#suspects / 2), int(now_us())
  for n, suspect in ipairs(suspects) do
    local tk, r, s = unpack(suspect)
    local is_alone = (n <= half and half or #suspects - half) == 1
    local group = is_alone and '1' or id .. (n <= half and 'a' or 'b')
    if not is_alone then
      call('SADD', suspects_key(group), r .. '|' .. s)
      call('EXPIRE', suspects_key(group), GONE_S)
    end
    grant_task(tk, r, s, call('HGET', tk, 'role'), group)
  end
end
local function lose_owner(tk, r, s, how)
  if lose_unless_suspect(tk, r, s, how) then grant_suspects({{tk, r, s}}) end
end
-- Take a granted or running task from its owner, which is notified to release it before it can read the next grant itself.
local function take_back(tk, r, s)
  local t, owner = call('HMGET', tk, 'epoch', 'state'), nil
  if t[2] == 'granted' then withdraw(tk, r, s) else owner = remove_owner(tk, r, s) end
  if owner and owner ~= '' then notice(owner, 'k', 'y', 'r', r, 's', s, 'e', int(tonumber(t[1]) + 1)) end
end
-- The end of process w was observed: count it against the tasks for which it was silent before, unless they have progressed since. A task
-- that is a suspect from now on is taken from its present owner; a request whose task ran alone is condemned.
local function settle_evidence(w)
  local held, suspects = call('HGETALL', evidence_key(w)), {}
  call('DEL', evidence_key(w))
  for i = 1, #held, 2 do
    local r, s = string.match(held[i], '^(.-)|(.+)$')
    local produced, was_alone = string.match(held[i + 1], '^(.-)|(.*)$')
    local tk = task_key(r, s)
    local state = call('HGET', tk, 'state')
    if next_state('lost', state) and int(produced_by(tk)) == produced then
      local deaths = count_death(tk)
      if was_alone == '1' and deaths > MAX_DEATHS then condemn(r, s, deaths, w)
      elseif deaths >= MAX_DEATHS and (call('HGET', tk, 'alone') or '') == was_alone and was_alone ~= '1' then
        suspects[#suspects + 1] = {tk, r, s}
      end
    end
  end
  for _, suspect in ipairs(suspects) do
    take_back(unpack(suspect))
    lose_unless_suspect(suspect[1], suspect[2], suspect[3], 'suspected')
  end
  grant_suspects(suspects)
end
-- Revoke some of the tasks of a fenced worker or gateway, which ended as `how` says: Redis serves nothing else meanwhile, and a gateway may
-- hold thousands. While some are left, it is listed in `fencing`, and the leader continues (`fence_tasks`).
local function lose_tasks_of(w, how)
  local suspects, lost = {}, call('SPOP', tasks_of(w), FENCE_SLICE)
  table.sort(lost)  -- the oldest request first
  for _, pair in ipairs(lost) do
    local r, s = string.match(pair, '^(.-)|(.+)$')
    local tk = task_key(r, s)
    local of = call('HMGET', tk, 'owner', 'reserved_for')
    if of[1] == w then
      if lose_unless_suspect(tk, r, s, how) then suspects[#suspects + 1] = {tk, r, s} end
      call('HSET', tk, 'holder', '')
    elseif of[2] == w then
      withdraw(tk, r, s)
      lose_owner(tk, r, s, 'left')
    end
  end
  grant_suspects(suspects)
  if call('EXISTS', tasks_of(w)) == 1 then call('HSET', P .. 'fencing', w, how)
  else call('HDEL', P .. 'fencing', w) end
end
-- Stop granting to the worker; a standby worker takes its place. Tasks reserved for it and not claimed are granted to others.
local function stop_granting(w)
  local is = call('HMGET', P .. 'worker:' .. w, 'role', 'standby', 'draining')
  call('HSET', P .. 'worker:' .. w, 'draining', '1', 'standby', '')
  index_worker(w)
  for _, pair in ipairs(call('SMEMBERS', tasks_of(w))) do
    local r, s = string.match(pair, '^(.-)|(.+)$')
    if call('HGET', task_key(r, s), 'reserved_for') == w then
      withdraw(task_key(r, s), r, s)
      lose_owner(task_key(r, s), r, s, 'left')
    end
  end
  if is[1] and is[2] ~= '1' and is[3] ~= '1' then promote(is[1]) end
end
-- Return how many more tasks each of `roles` may be granted now, so that its workers soon claim them: tasks are claimed in the order of
-- their grants, whoever's they are.
local MAX_UNCLAIMED = 16
local function num_claimed_soon(roles, live)
  local soon = {}
  for i, role in ipairs(roles) do soon[i] = MAX_UNCLAIMED - (live >= MAX_UNCLAIMED and call('XLEN', P .. 'role:' .. role) or 0) end
  return soon
end
-- Return the answer for a request that is refused, nil if it is admitted: each of `roles` must have or expect a worker, and fewer
-- than `bound` requests be live. A request that `waits` until it is admitted must have its turn too ("turn"), and workers that soon
-- claim its tasks ("soon"). The refusal of another one is logged, at most once in some seconds: a flood of requests must not fill the
-- log. A refusal for a role is logged by the gateway, which may call again.
local function admission_refusal(r, gateway, bound, roles, grace_us, client, waits)
  local wanted, missing, retry_us = roles ~= '' and split(roles) or {}, {}, 0
  for i, of in ipairs(availability(wanted, tonumber(grace_us))) do
    if not of.admits then
      missing[#missing + 1] = wanted[i]
      retry_us = math.max(retry_us, of.retry_us)
    end
  end
  if #missing > 0 then return {'no_worker', int(retry_us), unpack(missing)} end
  local live = call('SCARD', P .. 'live')
  local free = tonumber(bound) - live
  if waits == 'soon' then free = math.min(free, unpack(num_claimed_soon(wanted, live))) end
  if free > 0 and (waits == '' or has_turn(client, free)) then return nil end
  if waits == '' and call('SET', P .. 'refusal_logged', r, 'NX', 'EX', REFUSING_S) then
    log_line('warning', 'web', gateway, '', r, 'request ' .. r .. ' is refused: ' .. live .. ' requests are live, and ' ..
      'limits.max_requests allows ' .. bound .. '; more such refusals within ' .. REFUSING_S .. ' s are not logged')
  end
  return {'full', live}
end
-- Write a request with its tasks: the client's, held by `gateway` at the epoch that is written already, and one per stage, each granted
-- to its first role: later stages wait, warm, before there is input. `what` is added to the trace. `of`: spec, blob, stages, edges,
-- outputs, event, session, kind and model (shown in the index of requests), edges of audio (retained for less long than the others),
-- retention s, audio's retention s, first role of each stage.
local function begin_request(r, gateway, what, of)
  local spec, blob, stages, edges, outputs, ev, session, kind, model, brief, retention_s, audio_retention_s, first_roles, client = unpack(of)
  local rk = P .. 'req:' .. r
  call('HSET', rk, 'spec', spec, 'created_us', int(now_us()), 'stages', stages .. ',client', 'edges', edges, 'outputs', outputs,
    'kind', kind, 'model', model, 'brief', brief, 'retention_s', retention_s, 'audio_retention_s', audio_retention_s, 'share', client)
  set_state(r, 'submitted')
  call('ZADD', P .. 'index:all', 0, r)
  if session ~= '' then call('HSET', rk, 'session', session) end
  if blob ~= '' then call('SET', rk .. ':blob', blob) end
  move(task_key(r, 'client'), r, 'client', 'attached')
  call('HSET', task_key(r, 'client'), 'owner', gateway, 'holder', gateway)
  call('SADD', tasks_of(gateway), r .. '|client')
  call('SADD', P .. 'live', r)
  count_live(client, 1)
  trace(r, what, '', '', gateway)
  event(ev)
  local first_roles_of = split(first_roles)
  for i, s in ipairs(split(stages)) do
    grant_task(task_key(r, s), r, s, first_roles_of[i], '', caching_worker(r, s, first_roles_of[i]))
  end
end
