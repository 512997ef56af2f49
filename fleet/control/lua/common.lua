-- Prepended to every script. P is the key prefix; all times are Redis's own, in microseconds.
local P = 'fleet:'
local call = redis.call
local MAX_EVENTS, MAX_INBOX, MAX_DEAD = 20000, 200000, 1000
local ENDLESS = '9000000000000000'

local function now_us()
  local t = call('TIME')
  return tonumber(t[1]) * 1000000 + tonumber(t[2])
end
local function int(n) return string.format('%.0f', n) end
local function task_key(r, s) return P .. 'req:' .. r .. ':task:' .. s end
local function edge_key(r, e) return P .. 'req:' .. r .. ':edge:' .. e end
local function loc_key(r, e) return P .. 'req:' .. r .. ':loc:' .. e end
local function kv_key(r, s) return P .. 'req:' .. r .. ':kv:' .. s end
local function tasks_of(w) return P .. 'worker:' .. w .. ':tasks' end
local function event(json) call('XADD', P .. 'events', 'MAXLEN', '~', MAX_EVENTS, '*', 'e', json) end
local function notice(w, ...)
  -- A gone worker has no inbox, and gets none: it would be a key that nobody deletes.
  call('XADD', P .. 'inbox:' .. w, 'NOMKSTREAM', 'MAXLEN', '~', MAX_INBOX, '*', ...)
end
-- A worker of the role that stands by takes tasks from now on, if there is one: that whose lease runs longest, so surely alive.
local function promote(role)
  for _, w in ipairs(call('ZREVRANGEBYSCORE', P .. 'workers', '+inf', int(now_us()))) do
    local of = call('HMGET', P .. 'worker:' .. w, 'role', 'standby')
    if of[1] == role and of[2] == '1' then
      call('HSET', P .. 'worker:' .. w, 'standby', '')
      notice(w, 'k', 'p')
      return
    end
  end
end
-- Why who owned the task at this epoch may not write for it: nil where it runs, for its request is live and its epoch the same.
local function refused(tk, r, epoch)
  local t = call('HMGET', tk, 'epoch', 'state')
  if t[1] ~= epoch then return 'stale' end
  if call('SISMEMBER', P .. 'live', r) == 0 then return 'ended' end
  return t[2] ~= 'running' and 'stale' or nil
end
local function leads(value) return call('GET', P .. 'conductor') == value end
local function raise(tk)
  local e = math.max(tonumber(call('HGET', tk, 'epoch') or '0') + 1, now_us())
  call('HSET', tk, 'epoch', int(e))
  return int(e)
end
local function disown(tk, r, s)
  local owner = call('HGET', tk, 'owner')
  if owner and owner ~= '' then call('SREM', tasks_of(owner), r .. '|' .. s) end
  call('HSET', tk, 'owner', '')
  return owner
end
-- A grant that was not claimed: nobody is to wait for it, be counted as waiting, or keep a slot for it.
local function withdraw(tk, r, s)
  local old = call('HMGET', tk, 'role', 'entry', 'to')
  if old[3] then
    call('SREM', tasks_of(old[3]), r .. '|' .. s)
    call('HDEL', tk, 'to')
  elseif old[1] and old[2] then
    call('XDEL', P .. 'role:' .. old[1], old[2])
  end
end
-- A worker died over the task, or (not `died`) left it: raise its epoch, count the deaths since it last appended, tell the conductor.
local function lose(tk, r, s, died)
  local epoch, made = raise(tk), 0
  local fields = call('HGETALL', tk)
  for i = 1, #fields, 2 do
    if string.sub(fields[i], 1, 9) == 'produced:' then made = made + tonumber(fields[i + 1]) end
  end
  local before = call('HMGET', tk, 'deaths', 'made_at_death', 'alone')
  local deaths = tonumber(before[1] or '0')
  if died then
    deaths = (before[2] == int(made)) and deaths + 1 or 1
    call('HSET', tk, 'deaths', int(deaths), 'made_at_death', int(made))
  end
  local alone = died and before[3] == '1'
  call('HSET', tk, 'state', 'lost', 'owner', '', 'died_alone', alone and '1' or '')
  event(cjson.encode({type = 'TaskLost', request = r, stage = s, epoch = 0, deaths = deaths, alone = alone})
    :gsub('"epoch":0', '"epoch":' .. epoch))
end
local function split(text)
  local out = {}
  for word in string.gmatch(text or '', '[^,]+') do out[#out + 1] = word end
  return out
end
-- Close request r: every right taken, every holder told, every key given its time to live.
local function close(r, state, code, message, param, retention_s, client_s)
  local rk = P .. 'req:' .. r
  if call('SREM', P .. 'live', r) == 0 then return 0 end
  call('HSET', rk, 'state', state, 'code', code, 'message', message, 'param', param, 'ended_us', int(now_us()))
  call('EXPIRE', rk, retention_s)
  call('DEL', rk .. ':blob')
  for _, s in ipairs(split(call('HGET', rk, 'stages'))) do
    local tk = task_key(r, s)
    local was = call('HGET', tk, 'state')
    local holder = call('HGET', tk, 'holder')
    disown(tk, r, s)
    raise(tk)
    if was == 'granted' then withdraw(tk, r, s) end
    if was ~= 'finished' then call('HSET', tk, 'state', state == 'finished' and 'finished' or 'aborted') end
    if holder and holder ~= '' then notice(holder, 'k', 'x', 'r', r, 's', state, 'c', code, 'm', message, 'p', param) end
    call('EXPIRE', tk, retention_s)
    call('DEL', kv_key(r, s))
  end
  for _, e in ipairs(split(call('HGET', rk, 'edges'))) do
    call('EXPIRE', edge_key(r, e), retention_s)
    call('DEL', loc_key(r, e))
  end
  for _, e in ipairs(split(call('HGET', rk, 'outputs'))) do call('EXPIRE', edge_key(r, e), client_s) end
  event(cjson.encode({type = 'RequestEnded', request = r, state = state, reason = message}))
  return 1
end
