-- claim: compares the grant's epoch, that it is unclaimed, not put to another worker, and the worker listed; writes the owner, the
-- worker's tasks, and the inputs, of which the new owner has taken nothing. The grant's entry is deleted whatever the answer. Answers
-- with the request, the task's hash, and all that was written for the task: its prompt's sound, the blocks on offer to it, per input
-- its chunks and where their tensors are, and per edge of its own its chunks, and the state of its consumer and how many that has taken.
-- ARGV: worker, role, entry id ("" where it came into the inbox), request, stage, epoch, number of inputs, inputs..., then for each
-- edge of its own: edge, consumer's stage
local w, role, entry, r, s, epoch, num_inputs = unpack(ARGV, 1, 7)
local tk = task_key(r, s)
if entry ~= '' then call('XDEL', P .. 'role:' .. role, entry) end
if not call('ZSCORE', P .. 'workers', w) then return {'unlisted'} end
if call('SISMEMBER', P .. 'live', r) == 0 then return {'ended'} end
local t = call('HMGET', tk, 'epoch', 'state', 'to')
if t[1] ~= epoch or t[2] ~= 'granted' or (t[3] and t[3] ~= w) then return {'stale'} end
if t[3] then call('HDEL', tk, 'to') end
call('HSET', tk, 'state', 'running', 'owner', w, 'holder', w, 'claimed_us', int(now_us()))
call('SADD', tasks_of(w), r .. '|' .. s)
restate(r, 'running')
mark(r, 'claimed', s, epoch, w, role)
count('out:' .. role)
event(cjson.encode({type = 'TaskClaimed', request = r, stage = s, epoch = 0, owner = w}):gsub('"epoch":0', '"epoch":' .. epoch))
local inputs, made, first_made = {}, {}, 8 + tonumber(num_inputs)
call('HSET', tk, 'inputs', table.concat(ARGV, ',', 8, first_made - 1))
for i = 8, first_made - 1 do
  call('HDEL', tk, 'rested:' .. ARGV[i])
  table.insert(inputs, {call('XRANGE', edge_key(r, ARGV[i]), '-', '+'), call('HGETALL', loc_key(r, ARGV[i]))})
end
for i = first_made, #ARGV, 2 do
  local consumer = call('HMGET', task_key(r, ARGV[i + 1]), 'state', 'consumed:' .. ARGV[i])
  table.insert(made, {call('XRANGE', edge_key(r, ARGV[i]), '-', '+'), consumer[1], consumer[2]})
end
local request = P .. 'req:' .. r
return {
  'ok', call('HGET', request, 'spec'), call('HGETALL', tk), call('GET', request .. ':blob'), call('HGETALL', kv_key(r, s)), inputs,
  made,
}
