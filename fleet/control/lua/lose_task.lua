-- lose_task: compares epoch, that the task runs, and request live; takes the task from its owner as if that had died over it: a
-- step over several tasks failed as a whole, and nobody can tell whose fault it was.
-- ARGV: request, stage, epoch
local r, s, epoch = unpack(ARGV)
local tk = task_key(r, s)
local why = refused(tk, r, epoch)
if why then return why end
disown(tk, r, s)
lose(tk, r, s, true)
return 'ok'
