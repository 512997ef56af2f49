-- stale_streams: reads which of a gateway's streams lack something that Redis has: the request's
-- end, another reader of the answer, chunks, a new epoch of an edge's producer, or that
-- acknowledgements were lost. Answers with their positions, from 0. Writes nothing.
-- ARGV: repeated: request, gateway, epoch (at which it reads the answer), num_edges, then repeated
-- 5: edge, producer (its stage), received (chunks), checked (epoch at which its producer was
-- checked; "": nothing more is read from the edge), acked (chunks)
local stale, position, first = {}, 0, 1
while first <= #ARGV do
  local request, gateway, epoch, num_edges = unpack(ARGV, first, first + 3)
  local first_edge, last = first + 4, first + 3 + 5 * tonumber(num_edges)
  local task, consumed_fields = task_key(request, 'client'), {}
  for i = first_edge, last, 5 do
    local edge = ARGV[i]
    consumed_fields[#consumed_fields + 1] = 'consumed:' .. edge
  end
  local owner, present_epoch = unpack(call('HMGET', task, 'owner', 'epoch'))
  local consumed = call('HMGET', task, unpack(consumed_fields))
  local is_stale = call('SISMEMBER', PREFIX .. 'live', request) == 0
    or owner ~= gateway or present_epoch ~= epoch
  for i = first_edge, last, 5 do
    local edge, producer, received, checked, acked = unpack(ARGV, i, i + 4)
    local number = (i - first_edge) / 5 + 1
    if tonumber(consumed[number] or '0') < tonumber(acked) then is_stale = true end
    if checked ~= '' then
      local producer_epoch, produced = unpack(
        call('HMGET', task_key(request, producer), 'epoch', 'produced:' .. edge))
      local has_more = tonumber(produced or '0') > tonumber(received)
      if (producer_epoch or '0') ~= checked or has_more then is_stale = true end
    end
  end
  if is_stale then stale[#stale + 1] = position end
  position = position + 1
  first = last + 1
end
return stale
