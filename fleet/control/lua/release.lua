-- release: compares that the blocks are still offered, and by this worker; withdraws them. Of confirm and release exactly one wins.
-- ARGV: request, stage, worker
pass_when_full()
local r, s, w = unpack(ARGV)
local kk = kv_key(r, s)
local kv = call('HMGET', kk, 'state', 'source')
if kv[1] ~= 'offered' or kv[2] ~= w then return 'stale' end
call('HSET', kk, 'state', 'released', 'pages', '', 'loc', '', 'data', '')
if call('SISMEMBER', P .. 'live', r) == 1 then trace(r, 'released', s, '', w) end
return 'ok'
