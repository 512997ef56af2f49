-- lose_tensors: compares the consumer's epoch and request live; writes an event that names the producer's task and epoch.
-- ARGV: request, consumer stage, epoch, producer stage
local r, s, epoch, producer = unpack(ARGV)
if call('HGET', task_key(r, s), 'epoch') ~= epoch then return 'stale' end
if call('SISMEMBER', P .. 'live', r) == 0 then return 'ended' end
local at = call('HGET', task_key(r, producer), 'epoch')
event(cjson.encode({type = 'TensorsLost', request = r, stage = producer, epoch = 0}):gsub('"epoch":0', '"epoch":' .. at))
return 'ok'
