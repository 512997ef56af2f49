-- fence_worker: compares the leader's term and the deadline that the leader saw unrenewed for the duration of the lease: Redis's clock
-- may have been set, so that the deadline alone proves nothing (leader "": the worker leaves, or its keeper saw it die);
-- removes the worker, and takes from it each task that it owns or that is reserved for it, which is granted again at a higher epoch: the
-- first ones here, the others by `fence_tasks`. A standby worker of its role takes its place. Its hash is retained for some minutes, and
-- a log line says how it ended and what it held.
-- An end that its keeper observed counts against the tasks that ran there, a lapsed lease does not: the process may live. One that
-- reports that it leaves after its lease lapsed has lived: its end, if it comes, counts against none of them.
-- ARGV: leader, worker, event, how ("died", "left" or, of a leader, "lapsed"), deadline us (of a leader)
pass_when_full()
local function archive(w, how, cause)
  local now, gone = now_us(), P .. 'gone:' .. w
  call('RENAME', P .. 'worker:' .. w, gone)
  call('HDEL', gone, 'transfer')
  call('HSET', gone, 'how', how, 'cause', cause, 'ended_us', int(now))
  call('EXPIRE', gone, GONE_S)
  call('ZADD', P .. 'gone', int(now), w)
  call('ZREMRANGEBYSCORE', P .. 'gone', '-inf', int(now - GONE_S * 1000000))
  call('ZREMRANGEBYRANK', P .. 'gone', 0, -MAX_GONE - 1)
end
local function log_end(w, role, how, cause, held, r)
  local process, stage = labels_of(role)
  local who = (role == '' and 'gateway ' or 'worker ') .. w
  if how == 'left' then
    log_fact('info', process, w, stage, r, who .. ' left; it held ' .. held)
  elseif how == 'died' then
    log_fact('warning', process, w, stage, r, who .. ' died (' .. (cause ~= '' and cause or 'cause unknown') .. '); it held ' .. held)
  else
    log_fact('warning', process, w, stage, r, who .. ' is lost: its lease lapsed, and no end of its process was seen; it held ' .. held)
  end
end
-- Log, once, the end of a process whose worker has been fenced or has left already.
local function log_late_end(w, cause)
  local gone = P .. 'gone:' .. w
  local is = call('HMGET', gone, 'role', 'how', 'cause')
  if not is[2] or is[2] == 'died' or is[3] ~= '' then return end
  call('HSET', gone, 'how', is[2] == 'lapsed' and 'died' or is[2], 'cause', cause)
  local process, stage = labels_of(is[1])
  log_fact('warning', process, w, stage, '', (is[1] == '' and 'gateway ' or 'worker ') .. w ..
    (is[2] == 'lapsed' and ', fenced when its lease lapsed, died (' or ', which had left, died (') .. cause .. ')')
end
local leader, w, ev, how, seen = unpack(ARGV)
if leader ~= '' then
  if not is_leader(leader) then return 'not_leader' end
  local deadline = call('ZSCORE', P .. 'workers', w)
  if not deadline or tonumber(deadline) ~= tonumber(seen) then return 'alive' end
end
call('ZREM', P .. 'workers', w)
index_worker(w)
local place = place_of(w)
if place and call('HGET', P .. 'places', place) == w then call('HDEL', P .. 'places', place) end
local held, only_request = held_by(w)
call('DEL', P .. 'inbox:' .. w)  -- first: a worker that still waits there must not receive the grants of its own tasks
lose_tasks_of(w, how)
if how == 'died' then settle_evidence(w) end
local is = call('HMGET', P .. 'worker:' .. w, 'role', 'standby', 'draining', 'ordered_off')
local role = is[1]
if not role and how == 'left' then call('DEL', evidence_key(w)) end
for _, first in ipairs(role and role ~= '' and {true, false} or {}) do
  redis.pcall('XGROUP', 'DELCONSUMER', role_key(role, first), 'workers.idle', w)
end
local cause = cjson.decode(ev).cause or ''
if not role and how == 'died' then log_late_end(w, cause) end
if role then
  archive(w, how, cause)
  log_end(w, role, how, cause, held, only_request)
end
-- New requests wait for the role's next worker unless this one was ordered to drain or stop; failed starts are counted from now on.
if role and role ~= '' and is[2] ~= '1' then
  call('HSET', availability_key(role), is[4] == '1' and 'left_us' or 'lost_us', int(now_us()))
  call('HDEL', availability_key(role), 'tries')
end
-- A leaving worker was replaced when it began to leave.
if role and role ~= '' and is[2] ~= '1' and is[3] ~= '1' then promote(role) end
event(ev)
return 'ok'
