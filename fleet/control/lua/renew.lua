-- renew: compares that the worker is listed; writes its deadline, in the indexes of workers too, the lease's duration and its load. If
-- it is unlisted it must register again.
-- A standby worker accepts tasks from now on if no other of its role does: its own lease may have been late when the last one was lost.
-- Answers "dump" once where an operator ordered its stacks. The first renewal of a drained worker that owns no tasks is logged.
-- ARGV: worker, lease us, then field/value pairs of its hash
pass_when_full()
local w, lease = ARGV[1], ARGV[2]
local wk = P .. 'worker:' .. w
if not call('ZSCORE', P .. 'workers', w) then return 'unlisted' end
local deadline = int(now_us() + tonumber(lease))
call('ZADD', P .. 'workers', deadline, w)
call('HSET', wk, 'lease_us', lease, unpack(ARGV, 3))
local is = call('HMGET', wk, 'draining', 'leaving', 'drained', 'role', 'standby', 'ordered_off', 'settings_group')
local role = is[4] or ''
if role ~= '' then call('ZADD', role_workers_key(role, status_of(is[5], is[1], is[6])), deadline, w) end
if is[7] then call('ZADD', settings_group_key(is[7]), deadline, w) end
if is[5] == '1' and call('EXISTS', role_workers_key(role, 'accepting')) == 0 then end_standby(w) end
if is[1] == '1' and is[2] ~= '1' and not is[3] and call('SCARD', tasks_of(w)) == 0 then
  call('HSET', wk, 'drained', '1')
  local process, stage = labels_of(role)
  log_fact('info', process, w, stage, '', 'worker ' .. w .. ' is drained: it holds no tasks and accepts none')
end
return call('HDEL', wk, 'dump') == 1 and 'dump' or 'ok'
