-- retain: compares request live and epoch; writes how many of the task's rows its session spared and, where its own are kept for the
-- session's next request, that this worker keeps them, for so long.
-- ARGV: request, stage, epoch, worker, session, rows kept, rows spared, ms
local r, s, epoch, w, session, kept, spared, keep_ms = unpack(ARGV)
local tk, sk = task_key(r, s), P .. 'sessions:' .. session
if call('SISMEMBER', P .. 'live', r) == 0 then return 'ended' end
if call('HGET', tk, 'epoch') ~= epoch then return 'stale' end
call('HSET', tk, 'spared', spared)
if kept ~= '0' then
  call('HSET', sk, s, w)
  call('PEXPIRE', sk, keep_ms)
  mark(r, 'kept', s, epoch, w, kept .. ' rows for the next turn')
end
return 'ok'
