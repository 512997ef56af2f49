-- overdue: compares the leader's term; decides about the oldest grants that were not claimed in time. If the role has had no worker for the
-- grace period, the request fails. A grant that a worker has read and not claimed is lost, and the task is granted again. A grant that waits
-- in its role's queue is not lost: the role is busy. Nor is the reservation of a task that must run alone, unless another worker is idle;
-- else one worker after another would stop accepting tasks. Answers "more" if others are due.
-- ARGV: leader, claim timeout us, grace us ("": absent workers were not observed for so long)
pass_when_full()
local leader, timeout_us, grace_us = unpack(ARGV)
if not is_leader(leader) then return 'not_leader' end
local function once_per_role(decide)
  local known = {}
  return function(role)
    if known[role] == nil then known[role] = decide(role) end
    return known[role]
  end
end
local function position_of(id)
  local ms, number = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(number)
end
local last_delivered = once_per_role(function(role)
  for _, group in ipairs(redis.pcall('XINFO', 'GROUPS', P .. 'role:' .. role)) do
    for i = 1, #group, 2 do
      if group[i] == 'last-delivered-id' then return group[i + 1] end
    end
  end
  return '0-0'
end)
local function is_delivered(role, entry)
  local last_ms, last_number = position_of(last_delivered(role))
  local ms, number = position_of(entry)
  return ms < last_ms or (ms == last_ms and number <= last_number)
end
local has_idle_worker = once_per_role(function(role)
  for _, worker in ipairs(call('ZRANGE', role_workers_key(role, 'accepting'), 0, -1)) do
    if call('SCARD', tasks_of(worker)) == 0 then return true end
  end
  return false
end)
local is_deserted = once_per_role(function(role)
  return grace_us ~= '' and not availability({role}, tonumber(grace_us))[1].keeps
end)
local function is_lost(role, entry, reserved_for, alone)
  if reserved_for then return alone ~= '1' or has_idle_worker(role) end
  return entry and is_delivered(role, entry)
end
local now = now_us()
local due = call('ZRANGEBYSCORE', P .. 'granted', '-inf', int(now - tonumber(timeout_us)), 'LIMIT', 0, OVERDUE_SLICE)
for _, pair in ipairs(due) do
  local request, stage = string.match(pair, '^(.-)|(.+)$')
  local task = task_key(request, stage)
  local role, entry, reserved_for, alone = unpack(call('HMGET', task, 'role', 'entry', 'reserved_for', 'alone'))
  if not role then call('ZREM', P .. 'granted', pair)  -- the request before it in this list failed, or its hash is lost
  elseif is_deserted(role) then
    close(request, 'failed', 'overloaded', 'no worker serves the role ' .. role .. '; start one with `fleet worker ' .. role .. '`', '')
  elseif is_lost(role, entry, reserved_for, alone) then
    withdraw(task, request, stage)
    grant_task(task, request, stage, role, alone)
  else call('ZADD', P .. 'granted', 'XX', int(now), pair) end
end
return #due == OVERDUE_SLICE and 'more' or 'ok'
