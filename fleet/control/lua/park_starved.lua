-- park_starved: compares epoch, that the task runs, and request live; removes the owner of a task
-- that waits for input from a parked task, with which it is granted again. No death is counted.
-- Answers "input" and changes nothing if no producer named here is parked, or if chunks have
-- arrived.
-- ARGV: request, stage, epoch, then repeated 3: edge (an input), producer (its stage), consumed
-- (chunks)
local request, stage, epoch = unpack(ARGV, 1, 3)
pass_when_full()
local task = task_key(request, stage)
local refusal = refusal_of(task, request, epoch)
if refusal then return refusal end
local parked = {}
for i = 4, #ARGV, 3 do
  local edge, producer, consumed = unpack(ARGV, i, i + 2)
  local state, produced = unpack(
    call('HMGET', task_key(request, producer), 'state', 'produced:' .. edge))
  if tonumber(produced or '0') > tonumber(consumed) then return 'input' end
  if state == 'parked' then parked[#parked + 1] = producer end
end
if #parked == 0 then return 'input' end
for _, producer in ipairs(parked) do
  local producer_task = task_key(request, producer)
  local starved = call('HGET', producer_task, 'starved') or ''
  call('HSET', producer_task, 'starved', starved .. stage .. ',')
end
local owner = remove_owner(task, request, stage)
move(task, request, stage, 'parked', 'parked_by', owner)
trace(request, 'parked', stage, epoch, owner, 'no input from ' .. table.concat(parked, ', '))
return 'parked'
