-- save_voice: compares the epoch of a voice session's holder; writes and deletes fields, and renews
-- the session's time to live. An epoch above Redis's, or a missing record of a session that has not
-- ended, proves that Redis lost writes: the holder's epoch is written, and the answer "restored"
-- asks it to write every field again.
-- ARGV: session, epoch, ttl_ms, owner, num_removed, removed (names of fields), then repeated 2:
-- field, value
local session, epoch, ttl_ms, owner, num_removed = unpack(ARGV, 1, 5)
local first_field = 6 + tonumber(num_removed)
local removed = {unpack(ARGV, 6, first_field - 1)}
pass_when_full()
local voice = PREFIX .. 'voice:' .. session
local present_epoch = call('HGET', voice, 'epoch')
if present_epoch and is_older(epoch, present_epoch) then return 'stale' end
if not present_epoch and call('EXISTS', PREFIX .. 'voice_ended:' .. session) == 1 then
  return 'stale'
end
if present_epoch ~= epoch then
  call('HSET', voice, 'epoch', epoch, 'owner', owner)
  call('HSETNX', voice, 'started_us', int(now_us()))
end
for _, field in ipairs(removed) do
  call('HDEL', voice, field)
end
for i = first_field, #ARGV, 2 do
  local field, value = unpack(ARGV, i, i + 1)
  call('HSET', voice, field, value)
end
list_voice(session, owner, ttl_ms)
return present_epoch == epoch and 'ok' or 'restored'
