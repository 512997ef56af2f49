-- end_start: ends the start that was announced for `place` or continued by `child`: its worker has joined after `took` us, or ("") none
-- will. Compares that it was announced. Its try stays counted if it `failed`, and not if it was stopped; a worker that joins resets
-- the count.
-- ARGV: role, place, child ("" where none continues it), took us, failed ("1")
pass_when_full()
local role, place, child, took, failed = unpack(ARGV)
local key, known = availability_key(role), false
for _, of in ipairs({place, child}) do known = withdraw_start(key, of, took ~= '' or failed == '1') or known end
if not known then return 'unknown' end
if took ~= '' then
  call('HSET', key, 'took_us', took)
  call('HDEL', key, 'tried_us')
end
return 'ok'
