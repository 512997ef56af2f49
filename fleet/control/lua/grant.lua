-- grant: compares the leader's term, the task's expected epoch, that nobody owns it and that the request is live; writes the task,
-- the role stream, an event. A finished task is granted only to make its tensors again ("remake").
-- ARGV: leader, request, stage, role, expected epoch, alone ("1"), remake ("1")
local leader, r, s, role, expected, alone, remake = unpack(ARGV)
if not leads(leader) then return {'not_leader'} end
if call('SISMEMBER', P .. 'live', r) == 0 then return {'ended'} end
local tk = task_key(r, s)
local t = call('HMGET', tk, 'epoch', 'state')
if (t[1] or '') ~= expected then return {'stale'} end
if t[2] == 'running' or (t[2] == 'finished' and remake ~= '1') then return {'owned'} end
local old = call('HMGET', tk, 'role', 'entry')
if old[1] and old[2] then call('XDEL', P .. 'role:' .. old[1], old[2]) end
disown(tk, r, s)
local epoch = raise(tk)
call('HSET', tk, 'state', 'granted', 'role', role, 'granted_us', int(now_us()), 'alone', alone)
local entry = call('XADD', P .. 'role:' .. role, '*', 'r', r, 's', s, 'e', epoch, 'a', alone)
call('HSET', tk, 'entry', entry)
event(cjson.encode({type = 'TaskGranted', request = r, stage = s, epoch = 0}):gsub('"epoch":0', '"epoch":' .. epoch))
return {'ok', epoch}
