-- release: compares that the blocks are still offered, and by this worker; withdraws them. Of
-- confirm and release exactly one wins.
-- ARGV: request, stage, worker
local request, stage, worker = unpack(ARGV)
pass_when_full()
local blocks = kv_key(request, stage)
local state, source = unpack(call('HMGET', blocks, 'state', 'source'))
if state ~= 'offered' or source ~= worker then return 'stale' end
call('HSET', blocks, 'state', 'released', 'pages', '', 'loc', '', 'data', '')
if call('SISMEMBER', PREFIX .. 'live', request) == 1 then
  trace(request, 'released', stage, '', worker)
end
return 'ok'
