-- note_request: compares that the request is known; writes a field of its hash that no script
-- reads, such as the times of the user's turn, or the gaps in the answer's sound.
-- ARGV: request, name, value
local request, name, value = unpack(ARGV)
local request_key = PREFIX .. 'req:' .. request
if call('EXISTS', request_key) == 0 then return 'unknown' end
call('HSET', request_key, name, value)
return 'ok'
