-- save_voice: compares the epoch of a voice session's holder; writes and deletes fields, and renews the session's time to live. An epoch
-- above Redis's, or a missing record of a session that has not ended, proves that Redis lost writes: the holder's epoch is written, and
-- the answer "restored" asks it to write every field again.
-- ARGV: session, epoch, time to live ms, owner, number of fields to delete, those, then field/value pairs
pass_when_full()
local session, epoch, ttl_ms, owner, removed = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local vk = P .. 'voice:' .. session
local known = call('HGET', vk, 'epoch')
if known and is_older(epoch, known) then return 'stale' end
if not known and call('EXISTS', P .. 'voice_ended:' .. session) == 1 then return 'stale' end
if known ~= epoch then
  call('HSET', vk, 'epoch', epoch, 'owner', owner)
  call('HSETNX', vk, 'started_us', int(now_us()))
end
for i = 6, 5 + removed do call('HDEL', vk, ARGV[i]) end
for i = 6 + removed, #ARGV, 2 do call('HSET', vk, ARGV[i], ARGV[i + 1]) end
list_voice(session, owner, ttl_ms)
return known == epoch and 'ok' or 'restored'
