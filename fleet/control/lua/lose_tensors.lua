-- lose_tensors: compares the consumer's epoch and request live; writes an event that names the producer's task and epoch. A producer
-- that runs makes them again by itself, unless it took over the blocks of whoever published them, and so skips them: then the task
-- is taken from it, to be made from the beginning.
-- ARGV: request, consumer stage, epoch, producer stage
local r, s, epoch, producer = unpack(ARGV)
if call('HGET', task_key(r, s), 'epoch') ~= epoch then return 'stale' end
if call('SISMEMBER', P .. 'live', r) == 0 then return 'ended' end
local tk = task_key(r, producer)
mark(r, 'tensors_lost', producer, '', call('HGET', tk, 'holder'), 'missed by ' .. s)
local t = call('HMGET', tk, 'epoch', 'state')
if t[2] == 'running' and call('HGET', kv_key(r, producer), 'taken') == t[1] then
  notice(disown(tk, r, producer), 'k', 'x', 'r', r, 's', 'lost', 'c', '', 'm', '', 'p', '')
  lose(tk, r, producer, false)
  return 'ok'
end
event(cjson.encode({type = 'TensorsLost', request = r, stage = producer, epoch = 0}):gsub('"epoch":0', '"epoch":' .. t[1]))
return 'ok'
