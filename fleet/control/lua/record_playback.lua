-- record_playback: compares that the request is known; writes the report of its client's player.
-- ARGV: request, played_samples, underruns
local request, played_samples, underruns = unpack(ARGV)
local request_key = PREFIX .. 'req:' .. request
if call('EXISTS', request_key) == 0 then return 'unknown' end
local playback = played_samples .. ',' .. underruns .. ',' .. int(now_us())
call('HSET', request_key, 'playback', playback)
return 'ok'
