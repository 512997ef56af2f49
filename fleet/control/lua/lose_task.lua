-- lose_task: compares epoch, that the task runs, and request live; removes the owner and grants the task again at a higher epoch: a step
-- over several tasks failed as a whole, and which task caused it is unknown. That counts against the task like an observed death.
-- ARGV: request, stage, epoch
pass_when_full()
local r, s, epoch = unpack(ARGV)
local tk = task_key(r, s)
local why = refusal_of(tk, r, epoch)
if why then return why end
remove_owner(tk, r, s)
lose_owner(tk, r, s, 'failed')
return 'ok'
