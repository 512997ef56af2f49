-- claim: compares the grant's epoch, that it is unclaimed and not reserved for another worker, and
-- that the worker is listed; writes the owner, the worker's tasks and the inputs that the request
-- uses, of which the new owner has consumed nothing; deletes the grant's entry. Answers with the
-- request, the task's hash and everything the task needs: the audio of its prompt if its stage
-- reads it, the blocks offered to it, per input edge its chunks and where their tensors are, per
-- output edge its chunks, its consumer's state and how much that consumed.
-- ARGV: worker, role, entry (its id; "" if the grant came by the inbox), request, stage, epoch,
-- reads_audio ("1": of the prompt), num_inputs, inputs, then repeated 2: edge (an output), consumer
-- (its stage)
local worker, role, entry, request, stage, epoch, reads_audio, num_inputs = unpack(ARGV, 1, 8)
local first_output = 9 + tonumber(num_inputs)
local inputs = {unpack(ARGV, 9, first_output - 1)}
pass_when_full()
local request_key, task = PREFIX .. 'req:' .. request, task_key(request, stage)
local refusal, reserved_for, lost_us = refused_claim(worker, request, stage, epoch)
if refusal then return {refusal} end
if reserved_for then call('HDEL', task, 'reserved_for') end
if entry ~= '' then delete_entry(task) end
move(task, request, stage, 'claimed', 'owner', worker, 'holder', worker, 'claimed_us',
  int(now_us()))
call('SADD', tasks_of(worker), request .. '|' .. stage)
set_state(request, 'running')
trace(request, 'claimed', stage, epoch, worker, role)
count('out:' .. role)
local claimed = {
  type = 'TaskClaimed', request = request, stage = stage, epoch = 0, owner = worker,
}
publish_event(cjson.encode(claimed):gsub('"epoch":0', '"epoch":' .. epoch))
local is_used, used = {}, {}
for _, edge in ipairs(split(call('HGET', request_key, 'edges'))) do is_used[edge] = true end
for _, edge in ipairs(inputs) do used[#used + 1] = is_used[edge] and edge or nil end
call('HSET', task, 'inputs', table.concat(used, ','))
local read, written = {}, {}
for i, edge in ipairs(inputs) do
  call('HDEL', task, 'idle_consumed:' .. edge)
  local chunks = call('XRANGE', edge_key(request, edge), '-', '+')
  read[i] = {chunks, call('HGETALL', location_key(request, edge))}
end
for i = first_output, #ARGV, 2 do
  local edge, consumer = unpack(ARGV, i, i + 1)
  local consumer_state, consumed = unpack(
    call('HMGET', task_key(request, consumer), 'state', 'consumed:' .. edge))
  local chunks = call('XRANGE', edge_key(request, edge), '-', '+')
  written[#written + 1] = {chunks, consumer_state, consumed}
end
local answer = {
  'ok',
  call('HGET', request_key, 'spec'),
  call('HGETALL', task),
  reads_audio == '1' and call('GET', request_key .. ':blob'),
  call('HGETALL', kv_key(request, stage)),
  read,
  written,
}
if lost_us then
  --rest
  call('HDEL', task, 'lost_us')
  write_journal('recovered', 'worker', worker, 'role', role, 'request', request, 'stage', stage,
    'pause_us', int(math.max(0, now_us() - tonumber(lost_us))))
end
return answer
