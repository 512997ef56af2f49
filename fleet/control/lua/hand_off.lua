-- hand_off: compares epoch, that the task runs, and request live; removes the owner at a higher epoch, writes where the computed blocks
-- are, and puts the task on the next role's stream, with an event. Without NIXL the hash contains the blocks.
-- ARGV: request, stage, epoch, worker, next role, rows, pages, location, data, end of the last step here (us, the worker's clock)
local r, s, epoch, w, role, rows, pages, loc, data, prefilled_us = unpack(ARGV)
local tk, kk = task_key(r, s), kv_key(r, s)
local why = refusal_of(tk, r, epoch)
if why then return {why} end
remove_owner(tk, r, s)
local e = raise_epoch(tk)
local alone = call('HGET', tk, 'alone') or ''
call('DEL', kk)
if pages ~= '' or loc ~= '' or data ~= '' then
  call('HSET', kk, 'state', 'offered', 'epoch', e, 'source', w, 'rows', rows, 'pages', pages, 'loc', loc, 'data', data)
end
local entry = call('XADD', P .. 'role:' .. role, '*', 'r', r, 's', s, 'e', e, 'a', alone)
local now = int(now_us())
call('HSET', tk, 'state', 'granted', 'role', role, 'entry', entry, 'granted_us', now, 'holder', '',
  'handed_us', now, 'prefilled_us', prefilled_us)
trace(r, 'handed_off', s, e, w, role)
count('in:' .. role)
event(cjson.encode({type = 'TaskHandedOff', request = r, stage = s, epoch = 0, role = role}):gsub('"epoch":0', '"epoch":' .. e))
return {'ok', e}
