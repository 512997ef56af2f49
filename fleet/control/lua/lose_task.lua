-- lose_task: compares epoch and request live; takes the task from its owner as if that had died over it: a step over several tasks
-- failed as a whole, and nobody can tell whose fault it was.
-- ARGV: request, stage, epoch
local r, s, epoch = unpack(ARGV)
local tk = task_key(r, s)
if call('HGET', tk, 'epoch') ~= epoch then return 'stale' end
if call('SISMEMBER', P .. 'live', r) == 0 then return 'ended' end
disown(tk, r, s)
lose(tk, r, s, true)
return 'ok'
