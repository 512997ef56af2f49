-- Voice sessions, stored responses, and the right to write the records of training.

local VOICE_ENDED_MS = 600000
-- Return why a worker may not write to the records of training, nil if it may: it must be listed
-- and not stand by, and, where it names an epoch, have the right to train at that epoch. An
-- operator ("") may.
local function training_refusal(worker, epoch)
  if worker == '' then return nil end
  if not call('ZSCORE', PREFIX .. 'workers', worker) then return 'unlisted' end
  if call('HGET', PREFIX .. 'worker:' .. worker, 'standby') == '1' then return 'unlisted' end
  local trainer, present_epoch = unpack(call('HMGET', PREFIX .. 'training', 'trainer', 'epoch'))
  if epoch ~= '' and (trainer ~= worker or present_epoch ~= epoch) then return 'stale' end
end
-- Return the number in the record of a version of the draft head; "0" without a record, as for the
-- head of the start.
local function number_of_version(record)
  return string.match(record or '', '"number":(%d+)') or '0'
end
local function voices_of(owner) return PREFIX .. 'voices_of:' .. owner end
-- Return the API key of a voice session's owner, "" for none. An owner is KEY, or KEY/HASH for a
-- client secret that this key has created.
local function key_of_owner(owner) return string.match(owner, '^[^/]*') end
-- Return the names under which an owner's sessions are counted: the API key, and the client secret.
local function counted_names(owner)
  local key = key_of_owner(owner)
  local names = key ~= '' and {key} or {}
  if key ~= owner then names[#names + 1] = owner end
  return names
end
-- Count the time of a voice session that has begun, since it was last counted, as audio of its key.
-- A session without a client is silent.
local function count_voice_time(voice, owner)
  local key, now = key_of_owner(owner), now_us()
  if key == '' then return end
  local counted_us, away_us, state = unpack(
    call('HMGET', voice, 'counted_us', 'away_us', 'state'))
  if counted_us and not away_us and state then count_audio(key, (now - counted_us) / 1000) end
  call('HSET', voice, 'counted_us', int(now))
end
-- Renew a voice session's time to live. The sessions of an API key and of a client secret are also
-- listed under these with the same time: a session whose gateway stopped renewing it is not
-- counted, and the list ends with the last of them.
local function list_voice(session, owner, ttl_ms)
  count_voice_time(PREFIX .. 'voice:' .. session, owner)
  local ends = int(now_us() + tonumber(ttl_ms) * 1000)
  call('PEXPIRE', PREFIX .. 'voice:' .. session, ttl_ms)
  call('ZADD', PREFIX .. 'voices', ends, session)
  call('ZREMRANGEBYSCORE', PREFIX .. 'voices', '-inf', int(now_us()))
  for _, name in ipairs(counted_names(owner)) do
    local voices = voices_of(name)
    call('ZREMRANGEBYSCORE', voices, '-inf', int(now_us()))
    call('ZADD', voices, ends, session)
    if call('PTTL', voices) < tonumber(ttl_ms) then call('PEXPIRE', voices, ttl_ms) end
  end
end
-- Delete a voice session and record its end.
local function forget_voice(session, owner, by_operator)
  count_voice_time(PREFIX .. 'voice:' .. session, owner)
  local ended_by = by_operator and '1' .. owner or '0'
  call('SET', PREFIX .. 'voice_ended:' .. session, ended_by, 'PX', VOICE_ENDED_MS)
  call('DEL', PREFIX .. 'voice:' .. session)
  call('ZREM', PREFIX .. 'voices', session)
  for _, name in ipairs(counted_names(owner)) do
    call('ZREM', voices_of(name), session)
  end
end
-- Return the sessions to end so that a new one is within the `bound` of an API key or client
-- secret: those whose client is away or whose gateway is unlisted, the longest absent first. Nil if
-- there are too few of them.
local function sessions_to_replace(name, bound)
  local num_open, absent = 0, {}
  for _, other in ipairs(call('ZRANGEBYSCORE', voices_of(name), int(now_us()), '+inf')) do
    local holder, away_us, owner = unpack(
      call('HMGET', PREFIX .. 'voice:' .. other, 'holder', 'away_us', 'owner'))
    local is_listed = holder and call('ZSCORE', PREFIX .. 'workers', holder)
    local since_us = is_listed and tonumber(away_us) or not is_listed and 0
    num_open = num_open + 1
    if since_us then
      absent[#absent + 1] = {since_us = since_us, session = other, owner = owner or name}
    end
  end
  table.sort(absent, function(one, other) return one.since_us < other.since_us end)
  local excess = num_open - tonumber(bound) + 1
  if excess > #absent then return nil end
  return {unpack(absent, 1, math.max(excess, 0))}
end
local MAX_RESPONSES_DROPPED = 256
-- Delete the record of a response, and its size from the sum of all.
local function drop_response(response)
  local sizes = PREFIX .. 'responses:sizes'
  local num_bytes = call('HGET', sizes, response)
  call('DEL', PREFIX .. 'response:' .. response)
  call('ZREM', PREFIX .. 'responses', response)
  if not num_bytes then return end
  call('HDEL', sizes, response)
  call('HINCRBY', sizes, '*', int(-tonumber(num_bytes)))
end
