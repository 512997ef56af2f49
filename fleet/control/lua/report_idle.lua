-- report_idle: compares epoch, that the task runs, and request live; writes how much of each input
-- the owner had consumed when it had no work left: if it dies before more arrives, that death is
-- not counted for the task.
-- ARGV: request, stage, epoch, then repeated 2: edge (an input), consumed (chunks)
local request, stage, epoch = unpack(ARGV, 1, 3)
local task = task_key(request, stage)
local refusal = refusal_of(task, request, epoch)
if refusal then return refusal end
for i = 4, #ARGV, 2 do
  local edge, consumed = unpack(ARGV, i, i + 1)
  call('HSET', task, 'idle_consumed:' .. edge, consumed)
end
return 'ok'
