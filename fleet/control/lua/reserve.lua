-- reserve: compares the grant's epoch, that it is unclaimed and not reserved for another worker, and that the worker is listed and not
-- draining; reserves the task for the worker, which is to claim it once nothing else runs there. Deletes the grant's entry in any case.
-- Repeating the call changes nothing, and shows whether the reservation still holds.
-- ARGV: worker, role, entry id, request, stage, epoch
local w, role, entry, r, s, epoch = unpack(ARGV)
local tk = task_key(r, s)
if entry ~= '' then call('XDEL', P .. 'role:' .. role, entry) end
if not call('ZSCORE', P .. 'workers', w) then return 'unlisted' end
if call('SISMEMBER', P .. 'live', r) == 0 then return 'ended' end
local t = call('HMGET', tk, 'epoch', 'state', 'reserved_for')
if t[1] ~= epoch or not next_state('claimed', t[2]) or (t[3] and t[3] ~= w) then return 'stale' end
if call('HGET', P .. 'worker:' .. w, 'draining') == '1' then return 'draining' end
call('HSET', tk, 'reserved_for', w)
call('SADD', tasks_of(w), r .. '|' .. s)
return 'ok'
