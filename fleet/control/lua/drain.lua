-- drain: compares that the incarnation is still listed; marks it as leaving by its own decision: it keeps its lease and its tasks,
-- and takes no more. From then on it is no capacity, and counts no more among its role's workers. It takes no more orders. Unless it
-- was ordered to drain or stop before, new requests wait for its next start.
-- ARGV: worker
local w = ARGV[1]
if not call('ZSCORE', P .. 'workers', w) then return 'unlisted' end
if call('HGET', P .. 'worker:' .. w, 'leaving') ~= '1' then
  local process, stage = labels_of(call('HGET', P .. 'worker:' .. w, 'role') or '')
  local held, r = held_by(w)
  log_line('info', process, w, stage, r, 'worker ' .. w .. ' is leaving by its own decision; it holds ' .. held)
end
quieten(w)
call('HSET', P .. 'worker:' .. w, 'leaving', '1')
return 'ok'
