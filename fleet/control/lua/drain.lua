-- drain: compares that the worker is listed; records that it leaves by its own decision: it keeps
-- its lease and its tasks, accepts no more, counts as no capacity of its role and takes no more
-- orders. Unless it was ordered to drain or stop before, new requests wait for its next start.
-- ARGV: worker
local worker = unpack(ARGV)
pass_when_full()
local worker_key = PREFIX .. 'worker:' .. worker
if not call('ZSCORE', PREFIX .. 'workers', worker) then return 'unlisted' end
local role = call('HGET', worker_key, 'role') or ''
local is_leaving = call('HGET', worker_key, 'leaving') == '1'
if not is_leaving then
  local process, stage = labels_of(role)
  local held, only_request = held_by(worker)
  log_fact('info', process, worker, stage, only_request,
    'worker ' .. worker .. ' is leaving by its own decision; it holds ' .. held)
end
stop_granting(worker)
if not is_leaving then
  write_journal('leaving', 'worker', worker, 'role', role, 'serving', num_serving(role))
end
call('HSET', worker_key, 'leaving', '1')
return 'ok'
