-- claim: compares the grant's epoch, that it is unclaimed, not put to another worker, and the worker listed; writes the owner and
-- the worker's tasks. The grant's entry is deleted whatever the answer. Answers with the request and the produced count of each
-- edge it writes.
-- ARGV: worker, role, entry id ("" where it came into the inbox), request, stage, epoch
local w, role, entry, r, s, epoch = unpack(ARGV)
local tk = task_key(r, s)
if entry ~= '' then call('XDEL', P .. 'role:' .. role, entry) end
if not call('ZSCORE', P .. 'workers', w) then return {'unlisted'} end
if call('SISMEMBER', P .. 'live', r) == 0 then return {'ended'} end
local t = call('HMGET', tk, 'epoch', 'state', 'to')
if t[1] ~= epoch or t[2] ~= 'granted' or (t[3] and t[3] ~= w) then return {'stale'} end
if t[3] then call('HDEL', tk, 'to') end
call('HSET', tk, 'state', 'running', 'owner', w, 'holder', w, 'claimed_us', int(now_us()))
call('SADD', tasks_of(w), r .. '|' .. s)
call('HSET', P .. 'req:' .. r, 'state', 'running')
event(cjson.encode({type = 'TaskClaimed', request = r, stage = s, epoch = 0, owner = w}):gsub('"epoch":0', '"epoch":' .. epoch))
return {'ok', call('HGET', P .. 'req:' .. r, 'spec'), call('HGETALL', tk)}
