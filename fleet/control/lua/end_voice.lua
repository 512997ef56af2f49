-- end_voice: deletes a voice session; compares the epoch of its holder, unless the API ends it, who needs none.
-- ARGV: session, epoch ("": by the API's right)
local session, epoch = unpack(ARGV)
local vk = P .. 'voice:' .. session
local known = call('HGET', vk, 'epoch')
if not known or (epoch ~= '' and known ~= epoch) then return 'stale' end
call('DEL', vk)
call('ZREM', P .. 'voices', session)
return 'ok'
