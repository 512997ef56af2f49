-- end_start: ends the start that was announced for `place` or continued by `child`: its worker has
-- joined after `took` us, or ("") none will. Compares that it was announced. Its try stays counted
-- if it `failed`, and not if it was stopped; a worker that joins resets the count.
-- ARGV: role, place, child ("" where none continues it), took_us, failed ("1")
local role, place, child, took_us, failed = unpack(ARGV)
pass_when_full()
local key, is_known = availability_key(role), false
local keeps_try = took_us ~= '' or failed == '1'
for _, each in ipairs({place, child}) do
  is_known = withdraw_start(key, each, keeps_try) or is_known
end
if not is_known then return 'unknown' end
if took_us ~= '' then
  call('HSET', key, 'took_us', took_us)
  call('HDEL', key, 'tried_us')
end
return 'ok'
