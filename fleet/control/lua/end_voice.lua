-- end_voice: deletes a voice session; compares the epoch of its holder, unless the API ends it, who needs none. That an operator
-- ended it is kept for its holder, and for a client of the same owner that comes back.
-- ARGV: session, epoch ("": by the API's right), ms for which an operator's end is kept
local session, epoch, kept_ms = unpack(ARGV)
local is = call('HMGET', P .. 'voice:' .. session, 'epoch', 'owner')
if not is[1] or (epoch ~= '' and is[1] ~= epoch) then return 'stale' end
if epoch == '' then call('SET', P .. 'voice_ended:' .. session, '1' .. (is[2] or ''), 'PX', kept_ms) end
forget_voice(session, is[2] or '')
return 'ok'
