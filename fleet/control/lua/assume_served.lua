-- assume_served: Redis restarted at `since` (us) and may have lost which roles were served: each
-- role counts as served until then, unless a later loss is recorded.
-- ARGV: since_us, then repeated 1: role
local since_us = ARGV[1]
for i = 2, #ARGV do
  local role = ARGV[i]
  local key = availability_key(role)
  local lost_us = tonumber(call('HGET', key, 'lost_us') or '0')
  if lost_us < tonumber(since_us) then call('HSET', key, 'lost_us', since_us) end
end
return 'ok'
