-- end_voice: deletes a voice session; compares the epoch of its holder, unless an operator ends it through the API. An operator's end
-- is recorded for the holder, and for a client of the same owner that reconnects.
-- ARGV: session, epoch ("": by the API's right), ms for which an operator's end is recorded
pass_when_full()
local session, epoch, record_ms = unpack(ARGV)
local is = call('HMGET', P .. 'voice:' .. session, 'epoch', 'owner')
if not is[1] or (epoch ~= '' and is[1] ~= epoch) then return 'stale' end
if epoch == '' then call('SET', P .. 'voice_ended:' .. session, '1' .. (is[2] or ''), 'PX', record_ms) end
forget_voice(session, is[2] or '')
return 'ok'
