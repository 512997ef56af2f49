-- save_response: stores the record of an ended response as a whole, for `ttl_ms`. All records
-- together have at most `max_bytes`: those that expire first are deleted, up to a number for each
-- call. A repeated call changes nothing but the expiry.
-- ARGV: response, owner, record, ttl_ms, max_bytes
local response, owner, record, ttl_ms, max_bytes = unpack(ARGV)
pass_when_full()
local stored, sizes, now = PREFIX .. 'responses', PREFIX .. 'responses:sizes', now_us()
drop_response(response)
call('HSET', PREFIX .. 'response:' .. response, 'owner', owner, 'record', record)
call('PEXPIRE', PREFIX .. 'response:' .. response, ttl_ms)
call('ZADD', stored, int(now + tonumber(ttl_ms) * 1000), response)
call('HSET', sizes, response, #record)
call('HINCRBY', sizes, '*', #record)
for _ = 1, MAX_RESPONSES_DROPPED do
  local first, ends_us = unpack(call('ZRANGE', stored, 0, 0, 'WITHSCORES'))
  local is_full = tonumber(call('HGET', sizes, '*')) > tonumber(max_bytes)
  if first == response or (tonumber(ends_us) > now and not is_full) then break end
  drop_response(first)
end
return 'ok'
