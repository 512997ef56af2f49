-- renew: compares that the worker is listed; writes its deadline and its load. If it is unlisted it must register again.
-- A standby worker accepts tasks from now on if no other of its role does: its own lease may have been late when the last one was lost.
-- Answers "dump" once where an operator ordered its stacks. The first renewal of a drained worker that owns no tasks is logged.
-- ARGV: worker, lease us, then field/value pairs of its hash
pass_when_full()
local function has_taker(role)
  for _, other in ipairs(call('ZREVRANGE', P .. 'workers', 0, -1)) do
    local of = call('HMGET', P .. 'worker:' .. other, 'role', 'standby', 'draining')
    if of[1] == role and of[2] ~= '1' and of[3] ~= '1' then return true end
  end
  return false
end
local w, lease = ARGV[1], ARGV[2]
if not call('ZSCORE', P .. 'workers', w) then return 'unlisted' end
call('ZADD', P .. 'workers', int(now_us() + tonumber(lease)), w)
for i = 3, #ARGV, 2 do call('HSET', P .. 'worker:' .. w, ARGV[i], ARGV[i + 1]) end
local is = call('HMGET', P .. 'worker:' .. w, 'draining', 'leaving', 'drained', 'role', 'standby')
if is[5] == '1' and not has_taker(is[4]) then
  call('HSET', P .. 'worker:' .. w, 'standby', '')
  notice(w, 'k', 'p')
end
if is[1] == '1' and is[2] ~= '1' and not is[3] and call('SCARD', tasks_of(w)) == 0 then
  call('HSET', P .. 'worker:' .. w, 'drained', '1')
  local process, stage = labels_of(is[4])
  log_line('info', process, w, stage, '', 'worker ' .. w .. ' is drained: it holds no tasks and accepts none')
end
return call('HDEL', P .. 'worker:' .. w, 'dump') == 1 and 'dump' or 'ok'
