-- hold_voice: gives a voice session to a gateway at a higher epoch, so that its former holder can no longer write. A new session must
-- not exist; any other must exist and have the same owner. A client secret has a bound of open sessions: beyond it, a new one replaces
-- those whose client is away or whose gateway is unlisted, the longest absent first. Sets when the session began; a session without a
-- saved state has only been queued, and begins now.
-- Answers {} if there is none of that name and owner, {'full'} beyond the bound, else epoch, age (us), all fields, sessions replaced.
-- ARGV: session, holder, time to live ms, owner ("": the API key), "1" for a new one, most open sessions of a client secret
local session, holder, ttl_ms, owner, new, bound = unpack(ARGV)
local vk = P .. 'voice:' .. session
local known = call('EXISTS', vk) == 1
if known == (new == '1') or (known and call('HGET', vk, 'owner') ~= owner) then return {} end
local now, replaced = now_us(), {}
if new == '1' and owner ~= '' then
  local open, lost = 0, {}
  for _, other in ipairs(call('ZRANGEBYSCORE', voices_of(owner), int(now), '+inf')) do
    local is = call('HMGET', P .. 'voice:' .. other, 'holder', 'away_us')
    local is_listed = is[1] and call('ZSCORE', P .. 'workers', is[1])
    local away_us = is_listed and tonumber(is[2]) or not is_listed and 0
    open = open + 1
    if away_us then lost[#lost + 1] = {away_us, other} end
  end
  table.sort(lost, function(a, b) return a[1] < b[1] end)
  local excess = open - tonumber(bound) + 1
  if excess > #lost then return {'full'} end
  for i = 1, excess do
    replaced[i] = lost[i][2]
    forget_voice(replaced[i], owner)
  end
end
local epoch = raise_epoch(vk)
call('HSET', vk, 'holder', holder, 'owner', owner)
call('HDEL', vk, 'away_us')
if call('HEXISTS', vk, 'state') == 0 or call('HEXISTS', vk, 'started_us') == 0 then call('HSET', vk, 'started_us', int(now)) end
list_voice(session, owner, ttl_ms)
return {epoch, int(now - tonumber(call('HGET', vk, 'started_us'))), call('HGETALL', vk), replaced}
