-- renew: compares that the incarnation is still listed; writes its deadline and how busy it is. Refused: register anew.
-- Answers "dump" once where an operator asked for its stacks. The first renewal of a drained worker that holds nothing
-- more is a line of the log.
-- ARGV: worker, lease us, then field/value pairs of its hash
local w, lease = ARGV[1], ARGV[2]
if not call('ZSCORE', P .. 'workers', w) then return 'unlisted' end
call('ZADD', P .. 'workers', int(now_us() + tonumber(lease)), w)
for i = 3, #ARGV, 2 do call('HSET', P .. 'worker:' .. w, ARGV[i], ARGV[i + 1]) end
local is = call('HMGET', P .. 'worker:' .. w, 'draining', 'leaving', 'drained', 'role')
if is[1] == '1' and is[2] ~= '1' and not is[3] and call('SCARD', tasks_of(w)) == 0 then
  call('HSET', P .. 'worker:' .. w, 'drained', '1')
  local process, stage = labels_of(is[4])
  log_line('info', process, w, stage, '', 'worker ' .. w .. ' is drained: it holds nothing and takes nothing new')
end
return call('HDEL', P .. 'worker:' .. w, 'dump') == 1 and 'dump' or 'ok'
