-- hold_voice: gives a voice session to a gateway at a higher epoch, so that its former holder can
-- no longer write. A new session must not exist; any other must exist and have the same owner. A
-- client secret has a bound of open sessions: beyond it, a new one replaces those whose client is
-- away or whose gateway is unlisted, the longest absent first. Sets when the session began; a
-- session without a saved state has only been queued, and begins now.
-- Answers {} if there is none of that name and owner, {'full'} beyond the bound, else epoch, age
-- (us), all fields, sessions replaced.
-- ARGV: session, holder, ttl_ms, owner ("": the API key), new ("1"), bound (most open sessions of a
-- client secret)
local session, holder, ttl_ms, owner, new, bound = unpack(ARGV)
local is_new = new == '1'
local voice = PREFIX .. 'voice:' .. session
local is_known = call('EXISTS', voice) == 1
if is_known == is_new then return {} end
if is_known and call('HGET', voice, 'owner') ~= owner then return {} end
local now, replaced = now_us(), {}
if is_new and owner ~= '' then
  local num_open, absent = 0, {}
  for _, other in ipairs(call('ZRANGEBYSCORE', voices_of(owner), int(now), '+inf')) do
    local other_holder, away_us = unpack(
      call('HMGET', PREFIX .. 'voice:' .. other, 'holder', 'away_us'))
    local is_listed = other_holder and call('ZSCORE', PREFIX .. 'workers', other_holder)
    local since_us = is_listed and tonumber(away_us) or not is_listed and 0
    num_open = num_open + 1
    if since_us then absent[#absent + 1] = {since_us = since_us, session = other} end
  end
  table.sort(absent, function(one, other) return one.since_us < other.since_us end)
  local excess = num_open - tonumber(bound) + 1
  if excess > #absent then return {'full'} end
  for i = 1, excess do
    replaced[i] = absent[i].session
    forget_voice(replaced[i], owner)
  end
end
local epoch = raise_epoch(voice)
call('HSET', voice, 'holder', holder, 'owner', owner)
call('HDEL', voice, 'away_us')
local has_begun = call('HEXISTS', voice, 'state') == 1
  and call('HEXISTS', voice, 'started_us') == 1
if not has_begun then call('HSET', voice, 'started_us', int(now)) end
list_voice(session, owner, ttl_ms)
local age_us = now - tonumber(call('HGET', voice, 'started_us'))
return {epoch, int(age_us), call('HGETALL', voice), replaced}
