-- end_request: compares the leader's term; closes the request as finished, failed or aborted. A request that killed the workers of a
-- stage also becomes a dead letter, with everything needed to submit it again.
-- ARGV: leader, request, state, code, message, param, retention s, client edge retention s, dead stage
pass_when_full()
local leader, r, state, code, message, param, retention, client, dead = unpack(ARGV)
if not is_leader(leader) then return 'not_leader' end
if dead ~= '' and call('SISMEMBER', P .. 'live', r) == 1 then
  call('HSET', P .. 'req:' .. r, 'failed_stage', dead)
  call('XADD', P .. 'dead_letters', 'MAXLEN', '~', MAX_DEAD, '*', 'r', r, 's', dead, 'why', message,
    'spec', call('HGET', P .. 'req:' .. r, 'spec'), 'blob', call('GET', P .. 'req:' .. r .. ':blob') or '')
  local worker = call('HGET', task_key(r, dead), 'died_worker') or ''
  log_line('error', 'conductor', worker, dead, r, 'request ' .. r .. ' is a dead letter: ' .. message .. '; the last was ' ..
    (worker ~= '' and worker or 'unknown') .. '; `fleet dead-letters list` shows it')
end
return close(r, state, code, message, param, retention, client) == 1 and 'ok' or 'ended'
