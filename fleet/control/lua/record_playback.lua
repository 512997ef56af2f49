-- record_playback: compares that the request is known; writes the report of its client's player and
-- keeps the reports before it. Beyond their bound every second one is dropped: the numbers in them
-- only grow, so the others tell the same less exactly.
-- ARGV: request, played_samples, underruns
local MAX_EARLIER = 64
local request, played_samples, underruns = unpack(ARGV)
local request_key = PREFIX .. 'req:' .. request
if call('EXISTS', request_key) == 0 then return 'unknown' end
local last, kept = unpack(call('HMGET', request_key, 'playback', 'earlier_playback'))
local earlier = {}
for report in string.gmatch(kept or '', '[^;]+') do earlier[#earlier + 1] = report end
earlier[#earlier + 1] = last or nil
if #earlier > MAX_EARLIER then
  for place = 1, MAX_EARLIER / 2 do earlier[place] = earlier[2 * place] end
  earlier = {unpack(earlier, 1, MAX_EARLIER / 2)}
end
local playback = played_samples .. ',' .. underruns .. ',' .. int(now_us())
call('HSET', request_key, 'playback', playback, 'earlier_playback', table.concat(earlier, ';'))
return 'ok'
