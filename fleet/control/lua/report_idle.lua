-- rest: compares epoch, that the task runs, and request live; notes how much of each input its owner has taken who now has nothing left
-- to do: a death before more comes is not the task's.
-- ARGV: request, stage, epoch, then repeated 2: input edge, chunks taken
local r, s, epoch = unpack(ARGV, 1, 3)
local tk = task_key(r, s)
local why = refused(tk, r, epoch)
if why then return why end
for i = 4, #ARGV, 2 do call('HSET', tk, 'rested:' .. ARGV[i], ARGV[i + 1]) end
return 'ok'
