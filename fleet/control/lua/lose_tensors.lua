-- lose_tensors: compares the consumer's epoch and request live. A finished or parked producer is
-- granted again, to recompute its tensors. A running one recomputes them without an order, unless
-- it imported the blocks of the worker that published them and therefore skips them: then it loses
-- the task, which is granted again and computed from the beginning.
-- ARGV: request, stage (the consumer), epoch, producer (its stage)
local request, stage, epoch, producer = unpack(ARGV)
pass_when_full()
if call('HGET', task_key(request, stage), 'epoch') ~= epoch then return 'stale' end
if call('SISMEMBER', PREFIX .. 'live', request) == 0 then return 'ended' end
local task = task_key(request, producer)
local holder = call('HGET', task, 'holder')
trace(request, 'tensors_lost', producer, '', holder, 'missed by ' .. stage)
local producer_epoch, state, role, alone = unpack(
  call('HMGET', task, 'epoch', 'state', 'role', 'alone'))
if state == 'finished' then
  grant_task(task, request, producer, role, alone or '', nil, ', to recompute tensors')
elseif state == 'parked' then
  unpark(task, request, producer, ', to recompute tensors')
elseif state == 'running' then
  if call('HGET', kv_key(request, producer), 'confirmed_epoch') == producer_epoch then
    local owner = remove_owner(task, request, producer)
    notify(owner, 'k', 'x', 'r', request, 's', 'lost', 'c', '', 'm', '', 'p', '')
    lose_owner(task, request, producer, 'left')
  end
end
return 'ok'
