-- fence_worker: compares the leader's term and deadline < TIME (or "left": the worker says goodbye itself, leader "");
-- raises the epoch of each of its tasks, reports them lost, and forgets the worker. `deaths` counts the workers that died over a
-- task since it last appended anything.
-- ARGV: leader, worker, event, died ("1")
local leader, w, ev, died = unpack(ARGV)
local function count_death(tk)
  local made = 0
  local fields = call('HGETALL', tk)
  for i = 1, #fields, 2 do
    if string.sub(fields[i], 1, 9) == 'produced:' then made = made + tonumber(fields[i + 1]) end
  end
  local before = call('HMGET', tk, 'deaths', 'made_at_death')
  local deaths = tonumber(before[1] or '0')
  if died == '1' then
    deaths = (before[2] == int(made)) and deaths + 1 or 1
    call('HSET', tk, 'deaths', int(deaths), 'made_at_death', int(made))
  end
  return deaths
end
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
    local epoch, deaths = raise(tk), count_death(tk)
    local alone = died == '1' and call('HGET', tk, 'alone') == '1'
    call('HSET', tk, 'state', 'lost', 'owner', '', 'holder', '', 'died_alone', alone and '1' or '')
    event(cjson.encode({type = 'TaskLost', request = r, stage = s, epoch = 0, deaths = deaths, alone = alone})
      :gsub('"epoch":0', '"epoch":' .. epoch))
  end
end
local role = call('HGET', P .. 'worker:' .. w, 'role')
if role and role ~= '' then redis.pcall('XGROUP', 'DELCONSUMER', P .. 'role:' .. role, 'workers', w) end
call('DEL', tasks_of(w), P .. 'worker:' .. w, P .. 'inbox:' .. w)
event(ev)
return 'ok'
