-- assume_served: Redis restarted at `since` (us) and may have lost which roles were served: each role counts as served until then,
-- unless a later loss is recorded.
-- ARGV: since us, roles
for i = 2, #ARGV do
  local lost = tonumber(call('HGET', availability_key(ARGV[i]), 'lost_us') or '0')
  if lost < tonumber(ARGV[1]) then call('HSET', availability_key(ARGV[i]), 'lost_us', ARGV[1]) end
end
return 'ok'
