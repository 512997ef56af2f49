-- fence_worker: compares the leader's term and deadline < TIME (or "left": the worker says goodbye itself, leader "");
-- raises the epoch of each of its tasks, reports them lost, and forgets the worker.
-- ARGV: leader, worker, event
local leader, w, ev = unpack(ARGV)
if leader ~= '' then
  if not leads(leader) then return 'not_leader' end
  local deadline = call('ZSCORE', P .. 'workers', w)
  if not deadline or tonumber(deadline) >= now_us() then return 'alive' end
end
call('ZREM', P .. 'workers', w)
for _, pair in ipairs(call('SMEMBERS', tasks_of(w))) do
  local r, s = string.match(pair, '^(.-)|(.+)$')
  local tk = task_key(r, s)
  if call('HGET', tk, 'owner') == w then
    local epoch = raise(tk)
    call('HSET', tk, 'state', 'lost', 'owner', '', 'holder', '')
    event(cjson.encode({type = 'TaskLost', request = r, stage = s, epoch = 0}):gsub('"epoch":0', '"epoch":' .. epoch))
  end
end
local role = call('HGET', P .. 'worker:' .. w, 'role')
if role and role ~= '' then redis.pcall('XGROUP', 'DELCONSUMER', P .. 'role:' .. role, 'workers', w) end
call('DEL', tasks_of(w), P .. 'worker:' .. w, P .. 'inbox:' .. w)
event(ev)
return 'ok'
