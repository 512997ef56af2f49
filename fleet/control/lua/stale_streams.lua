-- stale_streams: reads which of a gateway's streams lack something that Redis has: the request's end, another reader of the answer,
-- chunks, a new epoch of an edge's producer, or that acknowledgements were lost. Answers with their positions, from 0. Writes nothing.
-- ARGV: repeated: request, gateway and epoch at which it reads the answer, number of edges, then for each: edge, producer's stage,
-- chunks received, epoch at which its producer was checked ("": nothing more is read from the edge), chunks acknowledged
local out, i, position = {}, 1, 0
while i <= #ARGV do
  local r, gateway, epoch, last = ARGV[i], ARGV[i + 1], ARGV[i + 2], i + 3 + 5 * tonumber(ARGV[i + 3])
  local consumed_fields = {}
  for j = i + 4, last, 5 do consumed_fields[#consumed_fields + 1] = 'consumed:' .. ARGV[j] end
  local reader = call('HMGET', task_key(r, 'client'), 'owner', 'epoch')
  local consumed = call('HMGET', task_key(r, 'client'), unpack(consumed_fields))
  local is_stale = call('SISMEMBER', P .. 'live', r) == 0 or reader[1] ~= gateway or reader[2] ~= epoch
  for j = i + 4, last, 5 do
    local e, producer, received, checked, acked = unpack(ARGV, j, j + 4)
    if tonumber(consumed[(j - i - 4) / 5 + 1] or '0') < tonumber(acked) then is_stale = true end
    if checked ~= '' then
      local t = call('HMGET', task_key(r, producer), 'epoch', 'produced:' .. e)
      if (t[1] or '0') ~= checked or tonumber(t[2] or '0') > tonumber(received) then is_stale = true end
    end
  end
  if is_stale then out[#out + 1] = position end
  i, position = last + 1, position + 1
end
return out
