-- renew: compares that the worker is listed; writes its deadline, in the indexes of workers too,
-- the lease's duration and its load. If it is unlisted it must register again.
-- A standby worker accepts tasks from now on if no other of its role does: its own lease may have
-- been late when the last one was lost. Answers "dump" once where an operator ordered its stacks.
-- The first renewal of a drained worker that owns no tasks is logged.
-- ARGV: worker, lease_us, then repeated 2: field, value (of its hash)
local worker, lease_us = unpack(ARGV, 1, 2)
pass_when_full()
local worker_key = PREFIX .. 'worker:' .. worker
if not call('ZSCORE', PREFIX .. 'workers', worker) then return 'unlisted' end
local deadline = int(now_us() + tonumber(lease_us))
call('ZADD', PREFIX .. 'workers', deadline, worker)
call('HSET', worker_key, 'lease_us', lease_us, unpack(ARGV, 3))
local draining, leaving, drained, role, standby, ordered_off, group = unpack(
  call('HMGET', worker_key,
    'draining', 'leaving', 'drained', 'role', 'standby', 'ordered_off', 'settings_group'))
role = role or ''
if role ~= '' then
  local status = status_of(standby, draining, ordered_off)
  call('ZADD', role_workers_key(role, status), deadline, worker)
end
if group then call('ZADD', settings_group_key(group), deadline, worker) end
if standby == '1' and call('EXISTS', role_workers_key(role, 'accepting')) == 0 then
  end_standby(worker)
end
local only_drains = draining == '1' and leaving ~= '1'
if only_drains and not drained and call('SCARD', tasks_of(worker)) == 0 then
  call('HSET', worker_key, 'drained', '1')
  local process, stage = labels_of(role)
  log_fact('info', process, worker, stage, '',
    'worker ' .. worker .. ' is drained: it holds no tasks and accepts none')
end
return call('HDEL', worker_key, 'dump') == 1 and 'dump' or 'ok'
