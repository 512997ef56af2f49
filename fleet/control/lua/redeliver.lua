-- redeliver: an operator's order through the API. Compares that the request is live, the epoch at which the task was seen, and that it
-- is granted or runs; revokes it and grants it again at a higher epoch, without counting a death. Its owner is notified to release it,
-- before it can read that grant itself; what it has appended stays.
-- ARGV: request, stage, epoch ("0": any)
pass_when_full()
local r, s, epoch = unpack(ARGV)
local tk = task_key(r, s)
if call('EXISTS', P .. 'req:' .. r) == 0 then return 'unknown' end
local t = call('HMGET', tk, 'epoch', 'state')
if not t[2] then return 'no_task' end
if call('SISMEMBER', P .. 'live', r) == 0 then return 'ended' end
if epoch ~= '0' and t[1] ~= epoch then return 'stale' end
if not next_state('lost', t[2]) then return t[2] end
revoke(tk, r, s)
return 'ok'
