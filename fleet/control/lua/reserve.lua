-- reserve: compares the grant's epoch, that it is unclaimed, not put to another worker, and the worker listed and not draining; puts
-- the task to the worker, which is to claim it once nothing else runs there. The grant's entry is deleted whatever the answer.
-- Said again, it changes nothing: so a worker learns that a reservation is over.
-- ARGV: worker, role, entry id, request, stage, epoch
local w, role, entry, r, s, epoch = unpack(ARGV)
local tk = task_key(r, s)
if entry ~= '' then call('XDEL', P .. 'role:' .. role, entry) end
if not call('ZSCORE', P .. 'workers', w) then return 'unlisted' end
if call('SISMEMBER', P .. 'live', r) == 0 then return 'ended' end
local t = call('HMGET', tk, 'epoch', 'state', 'to')
if t[1] ~= epoch or t[2] ~= 'granted' or (t[3] and t[3] ~= w) then return 'stale' end
if call('HGET', P .. 'worker:' .. w, 'draining') == '1' then return 'draining' end
call('HSET', tk, 'to', w)
call('SADD', tasks_of(w), r .. '|' .. s)
return 'ok'
