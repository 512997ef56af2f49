-- hold_voice: gives a voice session to a gateway at a higher epoch, so that its former holder can write nothing more. A new session
-- must not exist; any other must, and be of the same owner. A new one of a client secret takes a place among that secret's sessions;
-- where these are at their bound, it replaces those whose client is away or whose gateway is dead, the longest absent first. Sets
-- when the session began; one that has never been written down only waited in line, and begins now.
-- Answers with {} for none of that name and owner, {'full'} beyond the bound, else epoch, age (us), all fields, sessions replaced.
-- ARGV: session, holder, ms it lives, owner ("": the API key), "1" for a new one, most open sessions of a client secret
local session, holder, keep_ms, owner, new, bound = unpack(ARGV)
local vk = P .. 'voice:' .. session
local known = call('EXISTS', vk) == 1
if known == (new == '1') or (known and (call('HGET', vk, 'owner') or '') ~= owner) then return {} end
local now, replaced = now_us(), {}
if new == '1' and owner ~= '' then
  local open, lost = 0, {}
  for _, other in ipairs(call('ZRANGEBYSCORE', voices_of(owner), int(now), '+inf')) do
    local is = call('HMGET', P .. 'voice:' .. other, 'holder', 'away_us')
    local lease = tonumber(is[1] and call('ZSCORE', P .. 'workers', is[1]) or '0')
    local away_us = lease < now and 0 or tonumber(is[2])
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
local epoch = raise(vk)
call('HSET', vk, 'holder', holder, 'owner', owner)
call('HDEL', vk, 'away_us')
if call('HEXISTS', vk, 'state') == 0 or call('HEXISTS', vk, 'started_us') == 0 then call('HSET', vk, 'started_us', int(now)) end
list_voice(session, owner, keep_ms)
return {epoch, int(now - tonumber(call('HGET', vk, 'started_us'))), call('HGETALL', vk), replaced}
