-- grant: compares the leader's term, the task's expected epoch, that it neither runs nor has finished and that the request is live; grants
-- it again, since its grant is overdue.
-- ARGV: leader, request, stage, role, expected epoch, alone ("1")
pass_when_full()
local leader, r, s, role, expected, alone = unpack(ARGV)
if not is_leader(leader) then return {'not_leader'} end
if call('SISMEMBER', P .. 'live', r) == 0 then return {'ended'} end
local tk = task_key(r, s)
local t = call('HMGET', tk, 'epoch', 'state')
if (t[1] or '') ~= expected then return {'stale'} end
if t[2] == 'running' or t[2] == 'finished' then return {'owned'} end
withdraw(tk, r, s)
remove_owner(tk, r, s)
return {'ok', grant_task(tk, r, s, role, alone)}
