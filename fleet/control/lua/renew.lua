-- renew: compares that the incarnation is still listed; writes its deadline and how busy it is. Refused: register anew.
-- ARGV: worker, lease us, running
local w, lease, running = unpack(ARGV)
if not call('ZSCORE', P .. 'workers', w) then return 'unlisted' end
call('ZADD', P .. 'workers', int(now_us() + tonumber(lease)), w)
call('HSET', P .. 'worker:' .. w, 'running', running)
return 'ok'
