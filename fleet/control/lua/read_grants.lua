-- read_grants: compares that the worker is listed and accepts tasks, and each grant's epoch, that it is unclaimed and that its request
-- is live; reserves for the worker up to `free` grants of its role: all of the role's first stream before the other (`role_key`), and
-- each stream in its order. An empty notice ends the worker's wait for its inbox, if anything was read.
-- A role that hands its tasks off begins new ones only while the next role has room for them: the tasks that wait, run or are reserved
-- in both roles are fewer than twice the slots of the next role's workers. If that role expects no worker any more, grants are passed on
-- to it, where they wait for one or fail as those of any deserted role.
-- Answers the grants, as entries of a stream.
-- ARGV: worker, role, number of free slots
local w, role, free = ARGV[1], ARGV[2], tonumber(ARGV[3])
if not call('ZSCORE', P .. 'workers', w) then return 'unlisted' end
if call('XLEN', role_key(role, true)) + call('XLEN', role_key(role, false)) == 0 then return {} end
--rest
local out, num_read = {}, 0
local is = call('HMGET', P .. 'worker:' .. w, 'draining', 'standby', 'next_role', 'no_worker_us')
if is[1] == '1' or is[2] == '1' then return 'draining' end
local next_role = is[3] and is[3] ~= '' and is[3]
pass_when_full()
local function held_by_role(of, statuses)
  local held, slots = 0, 0
  for _, status in ipairs(statuses) do
    for _, other in ipairs(call('ZRANGE', role_workers_key(of, status), 0, -1)) do
      held = held + call('SCARD', tasks_of(other))
      slots = slots + tonumber(call('HGET', P .. 'worker:' .. other, 'capacity') or '0')
    end
  end
  return held, slots
end
-- Return how many new tasks the role may begin. A worker that waits for nothing would let the next role run dry, so that each of its
-- slots has a successor prepared; one task is, if it has no worker at the moment.
local function room()
  if not next_role then return free end
  local here = held_by_role(role, STATUSES)
  local there, slots = held_by_role(next_role, {'accepting'})
  local waiting = call('XLEN', role_key(next_role, true)) + call('XLEN', role_key(next_role, false))
  return math.max(2 * slots, 1) - here - there - waiting
end
local function pass_on(tk, r, s, alone)
  withdraw(tk, r, s)
  grant_task(tk, r, s, next_role, alone, nil, ', since it expects no worker')
end
local function reserve(tk, r, s, entry)
  call('HSET', tk, 'reserved_for', w)
  call('SADD', tasks_of(w), r .. '|' .. s)
  out[#out + 1] = entry
end
local is_passed_on = next_role and not availability({next_role}, tonumber(is[4] or '0'))[1].keeps
local function read(first, limit)
  local key = role_key(role, first)
  local entries = limit > 0 and call('XRANGE', key, '(' .. last_read(key), '+', 'COUNT', limit) or {}
  for _, entry in ipairs(entries) do
    local r, s, e, alone = entry[2][2], entry[2][4], entry[2][6], entry[2][8]
    local t = call('HMGET', task_key(r, s), 'epoch', 'state', 'reserved_for')
    local is_open = t[1] == e and t[2] == 'granted' and not t[3] and call('SISMEMBER', P .. 'live', r) == 1
    if not is_open then call('XDEL', key, entry[1])
    elseif is_passed_on then pass_on(task_key(r, s), r, s, alone)
    else reserve(task_key(r, s), r, s, entry) end
  end
  if #entries > 0 then call('XGROUP', 'SETID', key, 'workers', entries[#entries][1]) end
  num_read = num_read + #entries
end
read(true, free)
read(false, is_passed_on and free or math.min(free - #out, room()))
if num_read > 0 then notice(w, 'k', 'n') end
return out
