-- hold_voice: gives a voice session to a gateway at a higher epoch, so that whoever held it can write nothing more. Compares that
-- there is one, or for a new one that there is none; writes holder, epoch and when it ends. Answers with the epoch and all fields.
-- ARGV: session, holder, ms it lives, "1" for a new one
local session, holder, keep_ms, new = unpack(ARGV)
local vk = P .. 'voice:' .. session
if (call('EXISTS', vk) == 1) == (new == '1') then return {} end
local epoch = raise(vk)
call('HSET', vk, 'holder', holder)
call('PEXPIRE', vk, keep_ms)
call('ZADD', P .. 'voices', int(now_us() + tonumber(keep_ms) * 1000), session)
return {epoch, call('HGETALL', vk)}
