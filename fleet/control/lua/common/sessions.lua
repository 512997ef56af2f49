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
-- Renew a voice session's time to live. A client secret's sessions are also listed under that
-- secret with the same time: a session whose gateway stopped renewing it is not counted, and the
-- list ends with the last of them.
local function list_voice(session, owner, ttl_ms)
  local ends = int(now_us() + tonumber(ttl_ms) * 1000)
  call('PEXPIRE', PREFIX .. 'voice:' .. session, ttl_ms)
  call('ZADD', PREFIX .. 'voices', ends, session)
  call('ZREMRANGEBYSCORE', PREFIX .. 'voices', '-inf', int(now_us()))
  if owner == '' then return end
  local voices = voices_of(owner)
  call('ZREMRANGEBYSCORE', voices, '-inf', int(now_us()))
  call('ZADD', voices, ends, session)
  if call('PTTL', voices) < tonumber(ttl_ms) then call('PEXPIRE', voices, ttl_ms) end
end
-- Delete a voice session and record its end.
local function forget_voice(session, owner, by_operator)
  local ended_by = by_operator and '1' .. owner or '0'
  call('SET', PREFIX .. 'voice_ended:' .. session, ended_by, 'PX', VOICE_ENDED_MS)
  call('DEL', PREFIX .. 'voice:' .. session)
  call('ZREM', PREFIX .. 'voices', session)
  if owner ~= '' then call('ZREM', voices_of(owner), session) end
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
