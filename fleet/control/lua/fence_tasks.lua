-- fence_tasks: compares the leader's term, and that the fenced worker or gateway still holds tasks (`fencing`); takes some of them from
-- it, which are granted again at a higher epoch. Answers "more" while others are left.
-- ARGV: leader, worker
pass_when_full()
local leader, w = unpack(ARGV)
if not is_leader(leader) then return 'not_leader' end
local how = call('HGET', P .. 'fencing', w)
if not how then return 'ok' end
lose_tasks_of(w, how)
return call('HEXISTS', P .. 'fencing', w) == 1 and 'more' or 'ok'
