-- fence_tasks: compares the leader's term, and that the fenced worker or gateway still holds tasks
-- (`fencing`); takes some of them from it, which are granted again at a higher epoch. Answers
-- "more" while others are left.
-- ARGV: leader, worker
local leader, worker = unpack(ARGV)
pass_when_full()
if not is_leader(leader) then return 'not_leader' end
local how = call('HGET', PREFIX .. 'fencing', worker)
if not how then return 'ok' end
lose_tasks_of(worker, how)
return call('HEXISTS', PREFIX .. 'fencing', worker) == 1 and 'more' or 'ok'
