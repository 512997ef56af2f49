-- redeliver: an operator's order through the API. Compares that the request is live, the epoch at
-- which the task was seen, and that it is granted or runs; revokes it and grants it again at a
-- higher epoch, without counting a death. Its owner is notified to release it, before it can read
-- that grant itself; what it has appended stays.
-- ARGV: request, stage, epoch ("0": any), by (name of the API key that orders it; "" unknown)
local request, stage, epoch, by = unpack(ARGV)
pass_when_full()
local task = task_key(request, stage)
if call('EXISTS', PREFIX .. 'req:' .. request) == 0 then return 'unknown' end
local present_epoch, state = unpack(call('HMGET', task, 'epoch', 'state'))
if not state then return 'no_task' end
if call('SISMEMBER', PREFIX .. 'live', request) == 0 then return 'ended' end
if epoch ~= '0' and present_epoch ~= epoch then return 'stale' end
if not next_state('lost', state) then return state end
write_journal('ordered', 'request', request, 'stage', stage, 'by', by, 'detail', 'redeliver')
take_back(task, request, stage)
lose_owner(task, request, stage, 'revoked')
return 'ok'
