-- confirm: compares the new owner's epoch, request live, that the source still offers its blocks, and that it is listed (an unlisted
-- worker has reused them); confirms their import, once, and notifies the source to free them. Of confirm and release exactly one wins.
-- ARGV: request, stage, epoch
pass_when_full()
local r, s, epoch = unpack(ARGV)
local kk = kv_key(r, s)
if call('HGET', task_key(r, s), 'epoch') ~= epoch then return 'stale' end
if call('SISMEMBER', P .. 'live', r) == 0 then return 'ended' end
local kv = call('HMGET', kk, 'state', 'source')
if kv[1] ~= 'offered' or not call('ZSCORE', P .. 'workers', kv[2]) then return 'released' end
call('HSET', kk, 'state', 'confirmed', 'data', '', 'confirmed_epoch', epoch)
trace(r, 'confirmed', s, epoch, call('HGET', task_key(r, s), 'owner'), 'from ' .. kv[2])
notice(kv[2], 'k', 'f', 'r', r)
return 'ok'
