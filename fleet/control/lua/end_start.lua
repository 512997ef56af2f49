-- end_start: the start that was announced for `place` is over: its worker has joined after `took` us, or ("") none will come of it.
-- Compares that it was announced. Its try stays counted: the worker that joined has reset the count.
-- ARGV: role, place, took us
local role, place, took = unpack(ARGV)
if call('HDEL', availability_key(role), 'start:' .. place) == 0 then return 'unknown' end
if took ~= '' then call('HSET', availability_key(role), 'took_us', took) end
return 'ok'
