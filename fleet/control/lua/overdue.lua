-- overdue: compares the leader's term; decides about the oldest grants that were not claimed in
-- time. If the role has had no worker for the grace period, the request fails. A grant that a
-- worker has read and not claimed is lost, and the task is granted again. A grant that waits in its
-- role's queue is not lost: the role is busy. Nor is the reservation of a task that must run alone,
-- unless another worker is idle; else one worker after another would stop accepting tasks. Answers
-- "more" if others are due.
-- ARGV: leader, timeout_us (of claims), grace_us ("": absent workers were not observed for so long)
local leader, timeout_us, grace_us = unpack(ARGV)
pass_when_full()
if not is_leader(leader) then return 'not_leader' end
local function once(decide)
  local known = {}
  return function(subject)
    if known[subject] == nil then known[subject] = decide(subject) end
    return known[subject]
  end
end
local function position_of(id)
  local ms, number = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(number)
end
local last_read_of_stream = once(last_read)
local function is_read(role, entry, first)
  local last_ms, last_number = position_of(last_read_of_stream(role_key(role, first == '1')))
  local ms, number = position_of(entry)
  return ms < last_ms or (ms == last_ms and number <= last_number)
end
local has_idle_worker = once(function(role)
  for _, worker in ipairs(call('ZRANGE', role_workers_key(role, 'accepting'), 0, -1)) do
    if call('SCARD', tasks_of(worker)) == 0 then return true end
  end
  return false
end)
local is_deserted = once(function(role)
  return grace_us ~= '' and not availability({role}, tonumber(grace_us))[1].keeps
end)
local function is_lost(role, entry, first, reserved_for, alone)
  if reserved_for then return (alone or '') == '' or has_idle_worker(role) end
  return entry and is_read(role, entry, first)
end
local now, granted = now_us(), PREFIX .. 'granted'
local granted_before = int(now - tonumber(timeout_us))
local due = call('ZRANGEBYSCORE', granted, '-inf', granted_before, 'LIMIT', 0, OVERDUE_SLICE)
for _, pair in ipairs(due) do
  local request, stage = string.match(pair, '^(.-)|(.+)$')
  local task = task_key(request, stage)
  local role, entry, first, reserved_for, alone = unpack(
    call('HMGET', task, 'role', 'entry', 'first', 'reserved_for', 'alone'))
  if not role then
    -- The request before it in this list failed, or its hash is lost.
    call('ZREM', granted, pair)
  elseif is_deserted(role) then
    local remedy = 'start one with `fleet worker ' .. role .. '`'
    local message = 'no worker serves the role ' .. role .. '; ' .. remedy
    close_failed(request, stage, '', 'overloaded', message, '')
  elseif is_lost(role, entry, first, reserved_for, alone) then
    withdraw(task, request, stage)
    grant_task(task, request, stage, role, alone)
  else
    call('ZADD', granted, 'XX', int(now), pair)
  end
end
return #due == OVERDUE_SLICE and 'more' or 'ok'
