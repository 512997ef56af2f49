-- end_voice: deletes a voice session; compares the epoch of its holder, unless an operator ends it through the API. The end is recorded,
-- so that a late write of a former holder does not restore the session, and an operator's end for a client that reconnects.
-- ARGV: session, epoch ("": by the API's right)
pass_when_full()
local session, epoch = unpack(ARGV)
local is = call('HMGET', P .. 'voice:' .. session, 'epoch', 'owner')
if not is[1] or (epoch ~= '' and is_older(epoch, is[1])) then return 'stale' end
forget_voice(session, is[2] or '', epoch == '')
return 'ok'
