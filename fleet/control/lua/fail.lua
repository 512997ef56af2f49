-- fail: compares epoch, that the task runs, and request live; writes the task's end and error, and
-- an event, and closes the request as failed.
-- ARGV: request, stage, epoch, event, code, message, param
local request, stage, epoch, event, code, message, param = unpack(ARGV)
pass_when_full()
local task = task_key(request, stage)
local refusal = refusal_of(task, request, epoch)
if refusal then return refusal end
move(task, request, stage, 'failed', 'finished_us', int(now_us()), 'code', code,
  'message', message, 'param', param)
call('HSET', PREFIX .. 'req:' .. request, 'failed_stage', stage)
local owner = remove_owner(task, request, stage)
trace(request, 'failed', stage, epoch, owner, code .. ': ' .. message)
publish_event(event)
close_failed(request, stage, owner or '', code, message, param)
return 'ok'
