-- heard: compares that the request is known; writes what its listener's player says, for people to read.
-- ARGV: request, samples played, times it ran dry
local rk = P .. 'req:' .. ARGV[1]
if call('EXISTS', rk) == 0 then return 'unknown' end
call('HSET', rk, 'heard', ARGV[2] .. ',' .. ARGV[3] .. ',' .. int(now_us()))
return 'ok'
