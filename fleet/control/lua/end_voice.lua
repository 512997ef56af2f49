-- end_voice: deletes a voice session; compares the epoch of its holder, unless an operator ends it
-- through the API. The end is recorded, so that a late write of a former holder does not restore
-- the session, and an operator's end for a client that reconnects.
-- ARGV: session, epoch ("": by the API's right)
local session, epoch = unpack(ARGV)
pass_when_full()
local present_epoch, owner = unpack(call('HMGET', PREFIX .. 'voice:' .. session, 'epoch', 'owner'))
local by_operator = epoch == ''
if not present_epoch then return 'stale' end
if not by_operator and is_older(epoch, present_epoch) then return 'stale' end
forget_voice(session, owner or '', by_operator)
return 'ok'
