-- fence_worker: compares the leader's term and the deadline that the leader saw unrenewed for the
-- duration of the lease: Redis's clock may have been set, so that the deadline alone proves nothing
-- (leader "": the worker leaves, or its keeper saw it die); removes the worker, and takes from it
-- each task that it owns or that is reserved for it, which is granted again at a higher epoch: the
-- first ones here, the others by `fence_tasks`. A standby worker of its role takes its place. Its
-- hash is retained for days with the tasks that it held, and a log line and an entry of the journal
-- say how it ended.
-- An end that its keeper observed counts against the tasks that ran there, a lapsed lease does not:
-- the process may live. One that reports that it leaves after its lease lapsed has lived: its end,
-- if it comes, counts against none of them.
-- ARGV: leader, worker, event, how ("died", "left" or, of a leader, "lapsed"), deadline_us (of a
-- leader)
local leader, worker, event, how, deadline_us = unpack(ARGV)
pass_when_full()
local worker_key, gone_key = PREFIX .. 'worker:' .. worker, PREFIX .. 'gone:' .. worker
-- Return the first of the tasks, given as request|stage, as JSON of [request, stage] pairs.
local function as_json(tasks)
  if #tasks == 0 then return '[]' end
  local shown = {}
  for number = 1, math.min(#tasks, MAX_HELD) do
    shown[number] = {string.match(tasks[number], '^(.-)|(.+)$')}
  end
  return cjson.encode(shown)
end
local function keep_record(cause, tasks)
  local now, gone = now_us(), PREFIX .. 'gone'
  call('RENAME', worker_key, gone_key)
  call('HDEL', gone_key, 'transfer')
  call('HSET', gone_key, 'how', how, 'cause', cause, 'ended_us', int(now), 'held', as_json(tasks))
  call('EXPIRE', gone_key, GONE_S)
  call('ZADD', gone, int(now), worker)
  call('ZREMRANGEBYSCORE', gone, '-inf', int(now - GONE_S * 1000000))
  for _, oldest in ipairs(call('ZRANGE', gone, 0, -MAX_GONE - 1)) do
    call('ZREM', gone, oldest)
    call('DEL', PREFIX .. 'gone:' .. oldest)
  end
end
local function log_end(role, cause, held, only_request)
  local process, stage = labels_of(role)
  local level, ending = 'warning', ' is lost: its lease lapsed, and no end of its process was seen'
  if how == 'left' then
    level, ending = 'info', ' left'
  elseif how == 'died' then
    ending = ' died (' .. (cause ~= '' and cause or 'cause unknown') .. ')'
  end
  log_fact(level, process, worker, stage, only_request,
    (role == '' and 'gateway ' or 'worker ') .. worker .. ending .. '; it held ' .. held)
end
-- Log, once, the end of a process whose worker has been fenced or has left already.
local function log_late_end(cause)
  local role, how_before, cause_before = unpack(call('HMGET', gone_key, 'role', 'how', 'cause'))
  if not how_before or how_before == 'died' or cause_before ~= '' then return end
  local has_lapsed = how_before == 'lapsed'
  call('HSET', gone_key, 'how', has_lapsed and 'died' or how_before, 'cause', cause)
  write_journal('died', 'worker', worker, 'role', role, 'detail', cause)
  local process, stage = labels_of(role)
  local before = has_lapsed and ', fenced when its lease lapsed' or ', which had left'
  log_fact('warning', process, worker, stage, '',
    (role == '' and 'gateway ' or 'worker ') .. worker .. before .. ', died (' .. cause .. ')')
end
if leader ~= '' then
  if not is_leader(leader) then return 'not_leader' end
  local present_us = call('ZSCORE', PREFIX .. 'workers', worker)
  if not present_us or tonumber(present_us) ~= tonumber(deadline_us) then return 'alive' end
end
call('ZREM', PREFIX .. 'workers', worker)
index_worker(worker)
local place = place_of(worker)
if place and call('HGET', PREFIX .. 'places', place) == worker then
  call('HDEL', PREFIX .. 'places', place)
end
local held, only_request, tasks = held_by(worker)
local role, standby, draining, ordered_off = unpack(
  call('HMGET', worker_key, 'role', 'standby', 'draining', 'ordered_off'))
local cause = cjson.decode(event).cause or ''
if role then
  write_journal(how, 'worker', worker, 'role', role, 'detail', cause, 'count', #tasks,
    'serving', num_serving(role))
end
-- First: a worker that still waits there must not receive the grants of its own tasks.
call('DEL', PREFIX .. 'inbox:' .. worker)
lose_tasks_of(worker, how)
if how == 'died' then settle_evidence(worker) end
if not role and how == 'left' then call('DEL', evidence_key(worker)) end
local serves_role = role and role ~= ''
for _, first in ipairs(serves_role and {true, false} or {}) do
  redis.pcall('XGROUP', 'DELCONSUMER', role_key(role, first), 'workers.idle', worker)
end
if not role and how == 'died' then log_late_end(cause) end
if role then
  keep_record(cause, tasks)
  log_end(role, cause, held, only_request)
end
if serves_role and standby ~= '1' then
  -- New requests wait for the role's next worker unless this one was ordered to drain or stop;
  -- failed starts are counted from now on.
  local field = ordered_off == '1' and 'left_us' or 'lost_us'
  call('HSET', availability_key(role), field, int(now_us()))
  call('HDEL', availability_key(role), 'tries')
  -- A leaving worker was replaced when it began to leave.
  if draining ~= '1' then promote(role) end
end
publish_event(event)
return 'ok'
