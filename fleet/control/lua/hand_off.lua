-- hand_off: compares epoch, that the task runs, request live, and that the chunks produced before it are in their logs ("behind": an
-- append was refused); removes the owner, writes where the computed blocks are, and offers the task to the next role at a higher
-- epoch, with an event. Without NIXL the hash contains the blocks.
-- ARGV: request, stage, epoch, worker, next role, rows, pages, location, data, end of the last step here (us, the worker's clock), then for
-- each output edge: edge, chunks produced
local r, s, epoch, w, role, rows, pages, loc, data, prefilled_us = unpack(ARGV, 1, 10)
local tk, kk = task_key(r, s), kv_key(r, s)
local why = refusal_of(tk, r, epoch)
if why then return {why} end
for i = 11, #ARGV, 2 do
  if tonumber(call('HGET', tk, 'produced:' .. ARGV[i]) or '0') < tonumber(ARGV[i + 1]) then return {'behind'} end
end
local e = offer(tk, r, s, 'handed_off', role, call('HGET', tk, 'alone') or '')  -- first: a deletion before it would let the blocks into a full memory
remove_owner(tk, r, s)
call('DEL', kk)
if pages ~= '' or loc ~= '' or data ~= '' then
  call('HSET', kk, 'state', 'offered', 'epoch', e, 'source', w, 'rows', rows, 'pages', pages, 'loc', loc, 'data', data)
end
call('HSET', tk, 'holder', '', 'handed_us', int(now_us()), 'prefilled_us', prefilled_us)
trace(r, 'handed_off', s, e, w, role)
event(cjson.encode({type = 'TaskHandedOff', request = r, stage = s, epoch = 0, role = role}):gsub('"epoch":0', '"epoch":' .. e))
return {'ok', e}
