-- reserve: compares the grant's epoch, that it is unclaimed and not reserved for another worker, and that the worker is listed and not
-- draining; reserves the task for the worker, which is to claim it once nothing else runs there, and deletes the grant's entry.
-- Repeating the call changes nothing, and shows whether the reservation still holds.
-- ARGV: worker, role, entry id, request, stage, epoch
local w, role, entry, r, s, epoch = unpack(ARGV)
local tk = task_key(r, s)
if not call('ZSCORE', P .. 'workers', w) then return {'unlisted'} end
if call('SISMEMBER', P .. 'live', r) == 0 then return {'ended'} end
local t = call('HMGET', tk, 'epoch', 'state', 'reserved_for')
if t[1] ~= epoch or not next_state('claimed', t[2]) or (t[3] and t[3] ~= w) then return {'stale'} end
if call('HGET', P .. 'worker:' .. w, 'draining') == '1' then return {'draining'} end
local function hold(task, request, stage)
  call('HSET', task, 'reserved_for', w)
  call('SADD', tasks_of(w), request .. '|' .. stage)
end
hold(tk, r, s)
if entry ~= '' then delete_entry(tk) end
local group, others = call('HGET', tk, 'alone'), {}
for _, pair in ipairs(call('SMEMBERS', suspects_key(group))) do
  local request, stage = string.match(pair, '^(.-)|(.+)$')
  local task = task_key(request, stage)
  local of = call('HMGET', task, 'state', 'alone', 'reserved_for', 'role', 'epoch')
  if of[1] == 'granted' and of[2] == group and of[4] == role and (not of[3] or of[3] == w) and task ~= tk then
    if not of[3] then delete_entry(task) end
    hold(task, request, stage)
    for _, value in ipairs({request, stage, of[5]}) do others[#others + 1] = value end
  end
end
return {'ok', group, unpack(others)}
