-- read_grants: compares that the worker is listed and accepts tasks, and each grant's epoch, that
-- it is unclaimed and that its request is live; reserves for the worker up to `free` grants of its
-- role: all of the role's first stream before the other (`role_key`), and each stream in its order.
-- An empty notice ends the worker's wait for its inbox, if anything was read.
-- A role that hands its tasks off begins new ones only while the next role has room for them: the
-- tasks that wait, run or are reserved in both roles are fewer than twice the slots of the next
-- role's workers. If that role expects no worker any more, grants are passed on to it, where they
-- wait for one or fail as those of any deserted role.
-- Answers the grants, as entries of a stream.
-- ARGV: worker, role, free (number of slots)
local worker, role, free = unpack(ARGV)
if not call('ZSCORE', PREFIX .. 'workers', worker) then return 'unlisted' end
local num_waiting = call('XLEN', role_key(role, true)) + call('XLEN', role_key(role, false))
if num_waiting == 0 then return {} end
--rest
free = tonumber(free)
local grants, num_read = {}, 0
local draining, standby, next_role, grace_us = unpack(
  call('HMGET', PREFIX .. 'worker:' .. worker, 'draining', 'standby', 'next_role', 'no_worker_us'))
if draining == '1' or standby == '1' then return 'draining' end
next_role = next_role and next_role ~= '' and next_role
pass_when_full()
local function held_by_role(any_role, statuses)
  local held, slots = 0, 0
  for _, status in ipairs(statuses) do
    for _, other in ipairs(call('ZRANGE', role_workers_key(any_role, status), 0, -1)) do
      held = held + call('SCARD', tasks_of(other))
      slots = slots + tonumber(call('HGET', PREFIX .. 'worker:' .. other, 'capacity') or '0')
    end
  end
  return held, slots
end
-- Return how many new tasks the role may begin. A worker that waits for nothing would let the next
-- role run dry, so that each of its slots has a successor prepared; one task is, if it has no
-- worker at the moment.
local function room()
  if not next_role then return free end
  local here = held_by_role(role, STATUSES)
  local there, slots = held_by_role(next_role, {'accepting'})
  local waiting = call('XLEN', role_key(next_role, true))
    + call('XLEN', role_key(next_role, false))
  return math.max(2 * slots, 1) - here - there - waiting
end
local function pass_on(task, request, stage, alone)
  withdraw(task, request, stage)
  grant_task(task, request, stage, next_role, alone, nil, ', since it expects no worker')
end
local function reserve(task, request, stage, entry)
  call('HSET', task, 'reserved_for', worker)
  call('SADD', tasks_of(worker), request .. '|' .. stage)
  grants[#grants + 1] = entry
end
local is_passed_on = next_role and not availability({next_role}, tonumber(grace_us or '0'))[1].keeps
local function read(first, limit)
  local key = role_key(role, first)
  local entries = {}
  if limit > 0 then entries = call('XRANGE', key, '(' .. last_read(key), '+', 'COUNT', limit) end
  for _, entry in ipairs(entries) do
    local id, fields = unpack(entry)
    local _, request, _, stage, _, epoch, _, alone = unpack(fields)
    local task = task_key(request, stage)
    local present_epoch, state, reserved_for = unpack(
      call('HMGET', task, 'epoch', 'state', 'reserved_for'))
    local is_open = present_epoch == epoch and state == 'granted' and not reserved_for
      and call('SISMEMBER', PREFIX .. 'live', request) == 1
    if not is_open then
      call('XDEL', key, id)
    elseif is_passed_on then
      pass_on(task, request, stage, alone)
    else
      reserve(task, request, stage, entry)
    end
  end
  if #entries > 0 then call('XGROUP', 'SETID', key, 'workers', entries[#entries][1]) end
  num_read = num_read + #entries
end
read(true, free)
read(false, is_passed_on and free or math.min(free - #grants, room()))
if num_read > 0 then notify(worker, 'k', 'n') end
return grants
