-- relocate: compares epoch, request live, and that the chunk is in the log; writes where its tensors are now, and the consumer's inbox.
-- ARGV: request, stage, epoch, edge, consumer stage, index, location
local r, s, epoch, e, consumer, index, loc = unpack(ARGV)
local t = call('HMGET', task_key(r, s), 'epoch', 'produced:' .. e)
if t[1] ~= epoch then return 'stale' end
if call('SISMEMBER', P .. 'live', r) == 0 then return 'ended' end
if tonumber(index) >= tonumber(t[2] or '0') then return 'gap' end
call('HSET', loc_key(r, e), index, loc)
local holder = call('HGET', task_key(r, consumer), 'owner')
if holder and holder ~= '' then notice(holder, 'k', 'l', 'r', r, 'e', e, 'i', index, 'l', loc) end
return 'ok'
