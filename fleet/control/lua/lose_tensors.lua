-- lose_tensors: compares the consumer's epoch and request live. A finished or parked producer is granted again, to recompute its tensors. A
-- running one recomputes them without an order, unless it imported the blocks of the worker that published them and therefore skips them:
-- then it loses the task, which is granted again and computed from the beginning.
-- ARGV: request, consumer stage, epoch, producer stage
pass_when_full()
local r, s, epoch, producer = unpack(ARGV)
if call('HGET', task_key(r, s), 'epoch') ~= epoch then return 'stale' end
if call('SISMEMBER', P .. 'live', r) == 0 then return 'ended' end
local tk = task_key(r, producer)
trace(r, 'tensors_lost', producer, '', call('HGET', tk, 'holder'), 'missed by ' .. s)
local t = call('HMGET', tk, 'epoch', 'state', 'role', 'alone')
if t[2] == 'finished' then
  grant_task(tk, r, producer, t[3], t[4] or '', nil, ', to recompute tensors')
elseif t[2] == 'parked' then
  unpark(tk, r, producer, ', to recompute tensors')
elseif t[2] == 'running' and call('HGET', kv_key(r, producer), 'confirmed_epoch') == t[1] then
  notice(remove_owner(tk, r, producer), 'k', 'x', 'r', r, 's', 'lost', 'c', '', 'm', '', 'p', '')
  lose_owner(tk, r, producer, 'left')
end
return 'ok'
