-- keep_voice: compares the epoch of a voice session's holder; writes and deletes fields, and when it ends.
-- ARGV: session, epoch, ms it lives, number of fields to delete, those, then field/value pairs
local session, epoch, keep_ms, gone = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local vk = P .. 'voice:' .. session
if call('HGET', vk, 'epoch') ~= epoch then return 'stale' end
for i = 5, 4 + gone do call('HDEL', vk, ARGV[i]) end
for i = 5 + gone, #ARGV, 2 do call('HSET', vk, ARGV[i], ARGV[i + 1]) end
call('PEXPIRE', vk, keep_ms)
call('ZADD', P .. 'voices', int(now_us() + tonumber(keep_ms) * 1000), session)
return 'ok'
