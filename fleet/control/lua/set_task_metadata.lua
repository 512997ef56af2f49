-- set_task_metadata: compares the task's epoch; writes a named line for the request's trace. No script decides by it.
-- ARGV: request, stage, epoch, name, line
local r, s, epoch, name, line = unpack(ARGV)
local tk = task_key(r, s)
if call('HGET', tk, 'epoch') ~= epoch then return 'stale' end
call('HSET', tk, 'meta:' .. name, line)
return 'ok'
