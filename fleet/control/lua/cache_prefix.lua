-- cache_prefix: compares request live and epoch; writes how many of the task's rows were cached by
-- an earlier turn of its session and, if rows of this task are retained for the next turn, that
-- this worker caches them, with a time to live.
-- ARGV: request, stage, epoch, worker, session, retained (rows), cached (rows), ttl_ms
local request, stage, epoch, worker, session, retained, cached, ttl_ms = unpack(ARGV)
local task, cached_prefix = task_key(request, stage), PREFIX .. 'cached_prefix:' .. session
if call('SISMEMBER', PREFIX .. 'live', request) == 0 then return 'ended' end
if call('HGET', task, 'epoch') ~= epoch then return 'stale' end
call('HSET', task, 'cached_rows', cached)
if retained ~= '0' then
  call('HSET', cached_prefix, stage, worker)
  call('PEXPIRE', cached_prefix, ttl_ms)
  trace(request, 'kept', stage, epoch, worker, retained .. ' rows for the next turn')
end
return 'ok'
