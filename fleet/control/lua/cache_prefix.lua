-- cache_prefix: compares request live and epoch; writes how many of the task's rows were cached by an earlier turn of its session and,
-- if rows of this task are retained for the next turn, that this worker caches them, with a time to live.
-- ARGV: request, stage, epoch, worker, session, rows retained, rows that were cached, ms
local r, s, epoch, w, session, retained, cached, ttl_ms = unpack(ARGV)
local tk, sk = task_key(r, s), P .. 'cached_prefix:' .. session
if call('SISMEMBER', P .. 'live', r) == 0 then return 'ended' end
if call('HGET', tk, 'epoch') ~= epoch then return 'stale' end
call('HSET', tk, 'cached_rows', cached)
if retained ~= '0' then
  call('HSET', sk, s, w)
  call('PEXPIRE', sk, ttl_ms)
  trace(r, 'kept', s, epoch, w, retained .. ' rows for the next turn')
end
return 'ok'
