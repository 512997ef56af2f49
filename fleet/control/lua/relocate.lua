-- relocate: compares epoch, request live, and that the chunk is in the log; writes where its
-- tensors are now, and the consumer's inbox.
-- ARGV: request, stage, epoch, edge, consumer (its stage), index, location
local request, stage, epoch, edge, consumer, index, location = unpack(ARGV)
local present_epoch, produced = unpack(
  call('HMGET', task_key(request, stage), 'epoch', 'produced:' .. edge))
if present_epoch ~= epoch then return 'stale' end
if call('SISMEMBER', PREFIX .. 'live', request) == 0 then return 'ended' end
if tonumber(index) >= tonumber(produced or '0') then return 'gap' end
call('HSET', location_key(request, edge), index, location)
local reader = call('HGET', task_key(request, consumer), 'owner')
if reader and reader ~= '' then
  notify(reader, 'k', 'l', 'r', request, 'e', edge, 'i', index, 'l', location)
end
return 'ok'
