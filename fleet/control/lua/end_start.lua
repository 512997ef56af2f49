-- end_start: the start that was announced for `place`, or continued by `child`, is over: its worker has joined after `took` us, or ("")
-- none will come of it. Compares that it was announced. Its try stays counted if it `failed`; one that was stopped was none, and a
-- worker that joined has reset the count.
-- ARGV: role, place, child ("" where none continues it), took us, failed ("1")
local role, place, child, took, failed = unpack(ARGV)
local key, known = availability_key(role), false
for _, of in ipairs({place, child}) do known = withdraw_start(key, of, took ~= '' or failed == '1') or known end
if not known then return 'unknown' end
if took ~= '' then
  call('HSET', key, 'took_us', took)
  call('HDEL', key, 'tried_us')
end
return 'ok'
