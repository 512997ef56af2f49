-- record_turn: compares that the request is known; writes when the user's speech ended, and when
-- that was found to be the end of the turn. No script decides by it.
-- ARGV: request, voiced_end_us, decided_us
local request, voiced_end_us, decided_us = unpack(ARGV)
local request_key = PREFIX .. 'req:' .. request
if call('EXISTS', request_key) == 0 then return 'unknown' end
call('HSET', request_key, 'turn', voiced_end_us .. ',' .. decided_us)
return 'ok'
