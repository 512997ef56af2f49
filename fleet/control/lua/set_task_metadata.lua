-- tell: compares the task's epoch; adds a line to the task's story, for people to read. Nothing is decided by it.
-- ARGV: request, stage, epoch, name, line
local r, s, epoch, name, line = unpack(ARGV)
local tk = task_key(r, s)
if call('HGET', tk, 'epoch') ~= epoch then return 'stale' end
call('HSET', tk, 'told:' .. name, line)
return 'ok'
