-- end_voice: deletes a voice session; compares the epoch of its holder, unless the API ends it, who needs none. That an operator
-- ended it is kept for its holder, and for a client that comes back.
-- ARGV: session, epoch ("": by the API's right), ms for which an operator's end is kept
local session, epoch, kept_ms = unpack(ARGV)
local vk = P .. 'voice:' .. session
local known = call('HGET', vk, 'epoch')
if not known or (epoch ~= '' and known ~= epoch) then return 'stale' end
call('DEL', vk)
if epoch == '' then call('SET', P .. 'voice_ended:' .. session, '1', 'PX', kept_ms) end
call('ZREM', P .. 'voices', session)
return 'ok'
