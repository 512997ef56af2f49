-- renew: compares that the incarnation is still listed; writes its deadline and how busy it is. Refused: register anew.
-- Answers "dump" once where people bid it tell where its threads are.
-- ARGV: worker, lease us, then field/value pairs of its hash
local w, lease = ARGV[1], ARGV[2]
if not call('ZSCORE', P .. 'workers', w) then return 'unlisted' end
call('ZADD', P .. 'workers', int(now_us() + tonumber(lease)), w)
for i = 3, #ARGV, 2 do call('HSET', P .. 'worker:' .. w, ARGV[i], ARGV[i + 1]) end
return call('HDEL', P .. 'worker:' .. w, 'dump') == 1 and 'dump' or 'ok'
