-- fence_worker: compares the leader's term and deadline < TIME (or "left": the worker says goodbye itself, leader "");
-- raises the epoch of each of its tasks, and of those put to it, reports them lost, and forgets the worker; one that stands by takes
-- its place.
-- ARGV: leader, worker, event, died ("1")
local leader, w, ev, died = unpack(ARGV)
if leader ~= '' then
  if not leads(leader) then return 'not_leader' end
  local deadline = call('ZSCORE', P .. 'workers', w)
  if not deadline or tonumber(deadline) >= now_us() then return 'alive' end
end
call('ZREM', P .. 'workers', w)
for _, pair in ipairs(call('SMEMBERS', tasks_of(w))) do
  local r, s = string.match(pair, '^(.-)|(.+)$')
  local tk = task_key(r, s)
  local of = call('HMGET', tk, 'owner', 'to')
  if of[1] == w then
    lose(tk, r, s, died == '1')
    call('HSET', tk, 'holder', '')
  elseif of[2] == w then
    withdraw(tk, r, s)
    lose(tk, r, s, false)
  end
end
local is = call('HMGET', P .. 'worker:' .. w, 'role', 'standby', 'draining')
local role = is[1]
if role and role ~= '' then redis.pcall('XGROUP', 'DELCONSUMER', P .. 'role:' .. role, 'workers', w) end
call('DEL', tasks_of(w), P .. 'worker:' .. w, P .. 'inbox:' .. w)
-- One that was leaving has been replaced when it said so.
if role and role ~= '' and is[2] ~= '1' and is[3] ~= '1' then promote(role) end
event(ev)
return 'ok'
