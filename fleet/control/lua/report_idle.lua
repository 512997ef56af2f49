-- report_idle: compares epoch, that the task runs, and request live; writes how much of each input the owner had consumed when it had
-- no work left: if it dies before more arrives, that death is not counted for the task.
-- ARGV: request, stage, epoch, then repeated 2: input edge, chunks consumed
local r, s, epoch = unpack(ARGV, 1, 3)
local tk = task_key(r, s)
local why = refusal_of(tk, r, epoch)
if why then return why end
for i = 4, #ARGV, 2 do call('HSET', tk, 'idle_consumed:' .. ARGV[i], ARGV[i + 1]) end
return 'ok'
