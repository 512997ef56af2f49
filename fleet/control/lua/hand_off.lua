-- hand_off: compares epoch and request live; gives the task up at a higher epoch, says where its computed blocks are, and puts it on
-- the next role's stream, with an event. Blocks that fit no arena ride in the hash.
-- ARGV: request, stage, epoch, worker, next role, rows, location, data
local r, s, epoch, w, role, rows, loc, data = unpack(ARGV)
local tk, kk = task_key(r, s), kv_key(r, s)
if call('HGET', tk, 'epoch') ~= epoch then return {'stale'} end
if call('SISMEMBER', P .. 'live', r) == 0 then return {'ended'} end
disown(tk, r, s)
local e = raise(tk)
local alone = call('HGET', tk, 'alone') or ''
call('DEL', kk)
if loc ~= '' or data ~= '' then
  call('HSET', kk, 'state', 'offered', 'epoch', e, 'source', w, 'rows', rows, 'loc', loc, 'data', data)
end
local entry = call('XADD', P .. 'role:' .. role, '*', 'r', r, 's', s, 'e', e, 'a', alone)
call('HSET', tk, 'state', 'granted', 'role', role, 'entry', entry, 'granted_us', int(now_us()), 'holder', '')
event(cjson.encode({type = 'TaskHandedOff', request = r, stage = s, epoch = 0, role = role}):gsub('"epoch":0', '"epoch":' .. e))
return {'ok', e}
