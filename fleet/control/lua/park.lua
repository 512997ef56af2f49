-- park: compares epoch, that the task runs, and request live; removes the owner of a task that
-- waits for credit. Its slot is free, its logs are its state, and `ack` grants it again once every
-- edge named here has credit. No death is counted. If credit arrived meanwhile, nothing changes,
-- and the answer is "credit" and the chunks consumed of each edge.
-- ARGV: request, stage, epoch, then repeated 3: edge (an output without credit), consumer (its
-- stage), enough (chunks that must be consumed)
local request, stage, epoch = unpack(ARGV, 1, 3)
pass_when_full()
local task = task_key(request, stage)
local refusal = refusal_of(task, request, epoch)
if refusal then return {refusal} end
local answer, waits, edges, lacks_credit = {'credit'}, {}, {}, false
for i = 4, #ARGV, 3 do
  local edge, consumer, enough = unpack(ARGV, i, i + 2)
  local consumed = consumed_of(request, edge, consumer)
  answer[#answer + 1] = consumed
  waits[#waits + 1] = edge .. '|' .. consumer .. '|' .. enough
  edges[#edges + 1] = edge
  lacks_credit = lacks_credit or tonumber(consumed) < tonumber(enough)
end
if not lacks_credit then return answer end
local owner = remove_owner(task, request, stage)
move(task, request, stage, 'parked', 'waits', table.concat(waits, ','), 'parked_by', owner)
trace(request, 'parked', stage, epoch, owner, 'no credit on ' .. table.concat(edges, ', '))
return {'parked'}
