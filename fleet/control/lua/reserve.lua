-- reserve: compares the grant's epoch, that it is unclaimed and not reserved for another worker,
-- and that the worker is listed and not draining; reserves the task for the worker, which is to
-- claim it once nothing else runs there, and deletes the grant's entry. Repeating the call changes
-- nothing, and shows whether the reservation still holds.
-- ARGV: worker, role, entry (its id), request, stage, epoch
local worker, role, entry, request, stage, epoch = unpack(ARGV)
local task = task_key(request, stage)
local refusal = refused_claim(worker, request, stage, epoch)
if refusal then return {refusal} end
if call('HGET', PREFIX .. 'worker:' .. worker, 'draining') == '1' then return {'draining'} end
local function hold(held_task, pair)
  call('HSET', held_task, 'reserved_for', worker)
  call('SADD', tasks_of(worker), pair)
end
hold(task, request .. '|' .. stage)
if entry ~= '' then delete_entry(task) end
local group, others = call('HGET', task, 'alone'), {}
for _, pair in ipairs(call('SMEMBERS', suspects_key(group))) do
  local other_request, other_stage = string.match(pair, '^(.-)|(.+)$')
  local other_task = task_key(other_request, other_stage)
  local other_state, other_group, other_worker, other_role, other_epoch = unpack(
    call('HMGET', other_task, 'state', 'alone', 'reserved_for', 'role', 'epoch'))
  local is_of_group = other_group == group and other_role == role
  local is_free = not other_worker or other_worker == worker
  if other_state == 'granted' and is_of_group and is_free and other_task ~= task then
    if not other_worker then delete_entry(other_task) end
    hold(other_task, pair)
    for _, value in ipairs({other_request, other_stage, other_epoch}) do
      others[#others + 1] = value
    end
  end
end
return {'ok', group, unpack(others)}
