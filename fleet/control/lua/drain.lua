-- drain: compares that the worker is listed; records that it leaves by its own decision: it keeps its lease and its tasks, accepts no
-- more, counts as no capacity of its role and takes no more orders. Unless it was ordered to drain or stop before, new requests wait
-- for its next start.
-- ARGV: worker
pass_when_full()
local w = ARGV[1]
if not call('ZSCORE', P .. 'workers', w) then return 'unlisted' end
if call('HGET', P .. 'worker:' .. w, 'leaving') ~= '1' then
  local process, stage = labels_of(call('HGET', P .. 'worker:' .. w, 'role') or '')
  local held, r = held_by(w)
  log_fact('info', process, w, stage, r, 'worker ' .. w .. ' is leaving by its own decision; it holds ' .. held)
end
stop_granting(w)
call('HSET', P .. 'worker:' .. w, 'leaving', '1')
return 'ok'
