-- record_playback: compares that the request is known; writes the report of its client's player.
-- ARGV: request, samples played, underruns
local rk = P .. 'req:' .. ARGV[1]
if call('EXISTS', rk) == 0 then return 'unknown' end
call('HSET', rk, 'playback', ARGV[2] .. ',' .. ARGV[3] .. ',' .. int(now_us()))
return 'ok'
