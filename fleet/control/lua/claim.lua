-- claim: compares the grant's epoch, that it is unclaimed and not reserved for another worker, and that the worker is listed; writes
-- the owner, the worker's tasks and the inputs, of which the new owner has consumed nothing. Deletes the grant's entry in any case.
-- Answers with the request, the task's hash and everything the task needs: the audio of its prompt if its stage reads it, the blocks
-- offered to it, per input edge its chunks and where their tensors are, per output edge its chunks, its consumer's state and how much
-- that consumed.
-- ARGV: worker, role, entry id ("" if the grant came by the inbox), request, stage, epoch, reads the prompt's audio ("1"), number of
-- inputs, inputs..., then for each output: edge, consumer's stage
pass_when_full()
local w, role, entry, r, s, epoch, reads_audio, num_inputs = unpack(ARGV, 1, 8)
local tk = task_key(r, s)
if entry ~= '' then call('XDEL', P .. 'role:' .. role, entry) end
if not call('ZSCORE', P .. 'workers', w) then return {'unlisted'} end
if call('SISMEMBER', P .. 'live', r) == 0 then return {'ended'} end
local t = call('HMGET', tk, 'epoch', 'state', 'reserved_for')
if t[1] ~= epoch or not next_state('claimed', t[2]) or (t[3] and t[3] ~= w) then return {'stale'} end
if t[3] then call('HDEL', tk, 'reserved_for') end
move(tk, r, s, 'claimed')
call('HSET', tk, 'owner', w, 'holder', w, 'claimed_us', int(now_us()))
call('SADD', tasks_of(w), r .. '|' .. s)
set_state(r, 'running')
trace(r, 'claimed', s, epoch, w, role)
count('out:' .. role)
event(cjson.encode({type = 'TaskClaimed', request = r, stage = s, epoch = 0, owner = w}):gsub('"epoch":0', '"epoch":' .. epoch))
local inputs, outputs, first_output = {}, {}, 9 + tonumber(num_inputs)
call('HSET', tk, 'inputs', table.concat(ARGV, ',', 9, first_output - 1))
for i = 9, first_output - 1 do
  call('HDEL', tk, 'idle_consumed:' .. ARGV[i])
  table.insert(inputs, {call('XRANGE', edge_key(r, ARGV[i]), '-', '+'), call('HGETALL', loc_key(r, ARGV[i]))})
end
for i = first_output, #ARGV, 2 do
  local consumer = call('HMGET', task_key(r, ARGV[i + 1]), 'state', 'consumed:' .. ARGV[i])
  table.insert(outputs, {call('XRANGE', edge_key(r, ARGV[i]), '-', '+'), consumer[1], consumer[2]})
end
local request = P .. 'req:' .. r
return {
  'ok', call('HGET', request, 'spec'), call('HGETALL', tk), reads_audio == '1' and call('GET', request .. ':blob'),
  call('HGETALL', kv_key(r, s)), inputs, outputs,
}
