-- hand_off: compares epoch, that the task runs, request live, and that the chunks produced before
-- it are in their logs ("behind": an append was refused); removes the owner, writes where the
-- computed blocks are, and offers the task to the next role at a higher epoch, with an event.
-- Without NIXL the hash contains the blocks.
-- ARGV: request, stage, epoch, worker, role (the next one), rows, pages, location, data,
-- prefilled_us (end of the last step here, by the worker's clock), then repeated 2: edge (an
-- output), produced (chunks)
local request, stage, epoch, worker, role, rows, pages, location, data, prefilled_us =
  unpack(ARGV, 1, 10)
local task, blocks = task_key(request, stage), kv_key(request, stage)
local refusal = refusal_of(task, request, epoch)
if refusal then return {refusal} end
for i = 11, #ARGV, 2 do
  local edge, produced = unpack(ARGV, i, i + 1)
  local in_log = tonumber(call('HGET', task, 'produced:' .. edge) or '0')
  if in_log < tonumber(produced) then return {'behind'} end
end
-- First: a deletion before it would let the blocks into a full memory.
local alone = call('HGET', task, 'alone') or ''
local next_epoch = offer(task, request, stage, 'handed_off', role, alone)
remove_owner(task, request, stage)
call('DEL', blocks)
if pages ~= '' or location ~= '' or data ~= '' then
  call('HSET', blocks, 'state', 'offered', 'epoch', next_epoch, 'source', worker, 'rows', rows,
    'pages', pages, 'loc', location, 'data', data)
end
call('HSET', task, 'holder', '', 'handed_us', int(now_us()), 'prefilled_us', prefilled_us)
trace(request, 'handed_off', stage, next_epoch, worker, role)
local handed_off = {
  type = 'TaskHandedOff', request = request, stage = stage, epoch = 0, role = role,
}
publish_event(cjson.encode(handed_off):gsub('"epoch":0', '"epoch":' .. next_epoch))
return {'ok', next_epoch}
