-- save_voice: compares the epoch of a voice session's holder; writes and deletes fields, and renews the session's time to live.
-- ARGV: session, epoch, time to live ms, number of fields to delete, those, then field/value pairs
pass_when_full()
local session, epoch, ttl_ms, removed = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local vk = P .. 'voice:' .. session
local is = call('HMGET', vk, 'epoch', 'owner')
if is[1] ~= epoch then return 'stale' end
for i = 5, 4 + removed do call('HDEL', vk, ARGV[i]) end
for i = 5 + removed, #ARGV, 2 do call('HSET', vk, ARGV[i], ARGV[i + 1]) end
list_voice(session, is[2] or '', ttl_ms)
return 'ok'
