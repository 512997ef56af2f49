-- set_task_metadata: compares the task's epoch; writes a named line for the request's trace. No
-- script decides by it.
-- ARGV: request, stage, epoch, name, line
local request, stage, epoch, name, line = unpack(ARGV)
local task = task_key(request, stage)
if call('HGET', task, 'epoch') ~= epoch then return 'stale' end
call('HSET', task, 'meta:' .. name, line)
return 'ok'
