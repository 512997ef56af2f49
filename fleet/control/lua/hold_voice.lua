-- hold_voice: gives a voice session to a gateway at a higher epoch, so that its former holder can
-- no longer write. A new session must not exist; any other must exist and have the same owner. An
-- API key and a client secret have bounds of open sessions: beyond them, a new one replaces those
-- whose client is away or whose gateway is unlisted, the longest absent first. Sets when the
-- session began; a session without a saved state has only been queued, and begins now.
-- Answers {} if there is none of that name and owner, {'full'} beyond the secret's bound,
-- {'key_limit', limit, time s} at a limit of the key, else epoch, age (us), all fields, sessions
-- replaced.
-- ARGV: session, holder, ttl_ms, owner (KEY, KEY/HASH for a client secret, "" without keys),
-- new ("1"), bound (most open sessions of a client secret), key_bound (of the API key; "" none),
-- audio_bound (the key's seconds of audio a day; "" none)
local session, holder, ttl_ms, owner, new, bound, key_bound, audio_bound = unpack(ARGV)
local is_new = new == '1'
local voice = PREFIX .. 'voice:' .. session
local is_known = call('EXISTS', voice) == 1
if is_known == is_new then return {} end
if is_known and call('HGET', voice, 'owner') ~= owner then return {} end
local now, key, replaced = now_us(), key_of_owner(owner), {}
local function make_room(name, limit)
  local absent = sessions_to_replace(name, limit)
  for _, other in ipairs(absent or {}) do
    replaced[#replaced + 1] = other.session
    forget_voice(other.session, other.owner)
  end
  return absent ~= nil
end
if is_new then
  local refusal = audio_refusal(key, audio_bound)
  if refusal then return refusal end
  if key ~= owner and not make_room(owner, bound) then return {'full'} end
  if key_bound ~= '' and not make_room(key, key_bound) then
    return {'key_limit', 'max_sessions', 1}
  end
end
local epoch = raise_epoch(voice)
call('HSET', voice, 'holder', holder, 'owner', owner)
local has_begun = call('HEXISTS', voice, 'state') == 1
  and call('HEXISTS', voice, 'started_us') == 1
if not has_begun then call('HSET', voice, 'started_us', int(now)) end
list_voice(session, owner, ttl_ms)
call('HDEL', voice, 'away_us')
local age_us = now - tonumber(call('HGET', voice, 'started_us'))
return {epoch, int(age_us), call('HGETALL', voice), replaced}
