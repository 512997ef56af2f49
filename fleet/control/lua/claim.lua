-- claim: compares the grant's epoch, that it is unclaimed and the worker listed; writes the owner and the worker's tasks.
-- The grant's entry is deleted whatever the answer. Answers with the request and the produced count of each edge it writes.
-- ARGV: worker, role, entry id, request, stage, epoch
local w, role, entry, r, s, epoch = unpack(ARGV)
local tk = task_key(r, s)
call('XDEL', P .. 'role:' .. role, entry)
if not call('ZSCORE', P .. 'workers', w) then return {'unlisted'} end
if call('SISMEMBER', P .. 'live', r) == 0 then return {'ended'} end
local t = call('HMGET', tk, 'epoch', 'state')
if t[1] ~= epoch or t[2] ~= 'granted' then return {'stale'} end
call('HSET', tk, 'state', 'running', 'owner', w, 'holder', w, 'claimed_us', int(now_us()))
call('SADD', tasks_of(w), r .. '|' .. s)
call('HSET', P .. 'req:' .. r, 'state', 'running')
event(cjson.encode({type = 'TaskClaimed', request = r, stage = s, epoch = 0, owner = w}):gsub('"epoch":0', '"epoch":' .. epoch))
return {'ok', call('HGET', P .. 'req:' .. r, 'spec'), call('HGETALL', tk)}
