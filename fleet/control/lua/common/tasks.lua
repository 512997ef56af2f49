-- Moves of tasks, epochs, owners and grants.

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
-- Return why the worker may not claim or reserve the task with a grant at this epoch; else nil, the
-- worker that has reserved it, which is this one or nil, and the time at which its last owner lost
-- it (us; nil if none did).
local function refused_claim(worker, request, stage, epoch)
  if not call('ZSCORE', PREFIX .. 'workers', worker) then return 'unlisted' end
  if call('SISMEMBER', PREFIX .. 'live', request) == 0 then return 'ended' end
  local present_epoch, state, reserved_for, lost_us = unpack(
    call('HMGET', task_key(request, stage), 'epoch', 'state', 'reserved_for', 'lost_us'))
  if present_epoch ~= epoch or not next_state('claimed', state) then return 'stale' end
  if reserved_for and reserved_for ~= worker then return 'stale' end
  return nil, reserved_for, lost_us
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
local function is_leader(value) return call('GET', PREFIX .. 'conductor') == value end
-- Raise an epoch above its former value, the time of Redis, and `seen` ("" none): an epoch that a
-- holder has and Redis lost.
local function raise_epoch(key, seen)
  local written = tonumber(call('HGET', key, 'epoch') or '0')
  local former, now = math.max(written, tonumber(seen or '') or 0), now_us()
  -- Redis may lose its last writes, and must not issue their epochs again. The time differs; behind
  -- a clock that was set back, its part below a second. One script may raise an epoch twice.
  local set_back = now < former and now % 1000000 or 0
  local epoch = int(now > former and now or former + 1 + set_back)
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
