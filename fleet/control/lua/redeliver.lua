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
local owner
if t[2] == 'granted' then withdraw(tk, r, s)
elseif t[2] == 'running' then owner = remove_owner(tk, r, s)
else return t[2] end
if owner and owner ~= '' then notice(owner, 'k', 'y', 'r', r, 's', s, 'e', int(tonumber(t[1]) + 1)) end
lose_owner(tk, r, s, false, 'revoked')
return 'ok'
