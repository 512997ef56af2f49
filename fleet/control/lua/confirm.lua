-- confirm: compares the new owner's epoch, request live, and that the source still offers its blocks and is listed (one that is not
-- has used them again); takes them, once, and frees the source of them. Of confirm and release exactly one wins.
-- ARGV: request, stage, epoch
local r, s, epoch = unpack(ARGV)
local kk = kv_key(r, s)
if call('HGET', task_key(r, s), 'epoch') ~= epoch then return 'stale' end
if call('SISMEMBER', P .. 'live', r) == 0 then return 'ended' end
local kv = call('HMGET', kk, 'state', 'source')
if kv[1] ~= 'offered' or not call('ZSCORE', P .. 'workers', kv[2]) then return 'released' end
call('HSET', kk, 'state', 'confirmed', 'data', '', 'taken', epoch)
mark(r, 'confirmed', s, epoch, call('HGET', task_key(r, s), 'owner'), 'from ' .. kv[2])
notice(kv[2], 'k', 'f', 'r', r)
return 'ok'
