-- decline: compares the new owner's epoch, request live, and that the blocks are still offered; withdraws them, and notifies their source
-- to free them: the new owner cannot import them, and computes the positions.
-- ARGV: request, stage, epoch
pass_when_full()
local r, s, epoch = unpack(ARGV)
local kk = kv_key(r, s)
if call('HGET', task_key(r, s), 'epoch') ~= epoch then return 'stale' end
if call('SISMEMBER', P .. 'live', r) == 0 then return 'ended' end
local kv = call('HMGET', kk, 'state', 'source')
if kv[1] ~= 'offered' then return 'released' end
call('HSET', kk, 'state', 'released', 'pages', '', 'loc', '', 'data', '')
trace(r, 'released', s, epoch, kv[2], 'it cannot be imported')
notice(kv[2], 'k', 'f', 'r', r)
return 'ok'
