-- grant: compares the leader's term, the task's expected epoch, that it has no owner and that the request is live; writes the task,
-- the role stream and an event. A finished task is granted only to recompute its tensors ("remake").
-- A task's first grant goes to the inbox of the worker that caches its session's prefix, and reserves a slot there, if that worker is
-- alive, accepts tasks and has a free slot. If it stays unclaimed there, the next grant goes to the role stream.
-- ARGV: leader, request, stage, role, expected epoch, alone ("1"), remake ("1")
pass_when_full()
local leader, r, s, role, expected, alone, remake = unpack(ARGV)
if not is_leader(leader) then return {'not_leader'} end
if call('SISMEMBER', P .. 'live', r) == 0 then return {'ended'} end
local function caching_worker()
  local session = call('HGET', P .. 'req:' .. r, 'session')
  local w = session and call('HGET', P .. 'cached_prefix:' .. session, s)
  local deadline = w and call('ZSCORE', P .. 'workers', w)
  if not deadline or tonumber(deadline) < now_us() then return nil end
  local is = call('HMGET', P .. 'worker:' .. w, 'role', 'draining', 'standby', 'capacity')
  local has_room = call('SCARD', tasks_of(w)) < tonumber(is[4] or '0')
  return is[1] == role and is[2] ~= '1' and is[3] ~= '1' and has_room and w
end
local tk = task_key(r, s)
local t = call('HMGET', tk, 'epoch', 'state')
if (t[1] or '') ~= expected then return {'stale'} end
if t[2] == 'running' or (t[2] == 'finished' and remake ~= '1') then return {'owned'} end
local to = t[2] == 'pending' and caching_worker()
withdraw(tk, r, s)
remove_owner(tk, r, s)
local epoch = raise_epoch(tk)
call('HSET', tk, 'state', 'granted', 'role', role, 'granted_us', int(now_us()), 'alone', alone)
local how = (alone == '1' and ', alone' or '') .. (remake == '1' and ', to recompute tensors' or '')
trace(r, 'granted', s, epoch, to, role .. how)
count('in:' .. role)
if to then
  call('HSET', tk, 'reserved_for', to)
  call('SADD', tasks_of(to), r .. '|' .. s)
  notice(to, 'k', 'g', 'r', r, 's', s, 'e', epoch, 'a', alone)
else
  call('HSET', tk, 'entry', call('XADD', P .. 'role:' .. role, '*', 'r', r, 's', s, 'e', epoch, 'a', alone))
end
event(cjson.encode({type = 'TaskGranted', request = r, stage = s, epoch = 0}):gsub('"epoch":0', '"epoch":' .. epoch))
return {'ok', epoch}
