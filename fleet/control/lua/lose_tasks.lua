-- lose_tasks: for each task, compares epoch, that it runs, and request live; removes the owner and
-- grants the task again at a higher epoch: a step over several tasks failed as a whole, and which
-- task caused it is unknown. That counts against the tasks like an observed death.
-- ARGV: repeated 3: request, stage, epoch
pass_when_full()
local answers, suspects = {}, {}
for i = 1, #ARGV, 3 do
  local request, stage, epoch = unpack(ARGV, i, i + 2)
  local task = task_key(request, stage)
  local refusal = refusal_of(task, request, epoch)
  if not refusal then
    remove_owner(task, request, stage)
    if lose_unless_suspect(task, request, stage, 'failed') then
      suspects[#suspects + 1] = {task, request, stage}
    end
  end
  answers[#answers + 1] = refusal or 'ok'
end
grant_suspects(suspects)
return answers
