-- append: for each chunk, compares epoch, request live, that the task runs, and index = last + 1;
-- writes the edge, the location, the task's counts ("written": items|bytes|rows|time of the last
-- chunk, us), the consumer's inbox, an event if there is one, and the task's end if this chunk ends
-- it ("finish"), and the boundary, if the conductor decides the walk to which the chunk's consumer
-- changes ("asks"). The end of the request's last task closes it as finished. All chunks of the
-- call for one consumer are one entry of its inbox, without large headers.
-- A repeated chunk is answered "duplicate", also the chunk that ended the task.
-- ARGV: repeated 13: request, stage, epoch, edge, consumer (its stage), index, header, location,
-- event ("" none), finish ("1"), num_items, num_rows, asks ("1")
local function note_first_chunk(task, request, stage, epoch, edge, consumer, now)
  call('HSET', task, 'first_us:' .. edge, now)
  trace(request, 'output', stage, epoch, call('HGET', task, 'owner'), edge)
  if consumer == 'client' then
    local created_us = call('HGET', PREFIX .. 'req:' .. request, 'created_us')
    count_us('first:' .. edge, now - (created_us or now))
  end
end
local answers, now = {}, int(now_us())
for i = 1, #ARGV, 13 do
  local request, stage, epoch, edge, consumer, index, header, location, event, finish, num_items,
    num_rows, asks = unpack(ARGV, i, i + 12)
  index = tonumber(index)
  local task = task_key(request, stage)
  local present_epoch, produced, state, written = unpack(
    call('HMGET', task, 'epoch', 'produced:' .. edge, 'state', 'written:' .. edge))
  produced = tonumber(produced or '0')
  local answer = 'ok'
  -- A running task belongs to a live request: `close` leaves no task running.
  if present_epoch ~= epoch then
    answer = 'stale'
  elseif state ~= 'running' and call('SISMEMBER', PREFIX .. 'live', request) == 0 then
    answer = 'ended'
  elseif index < produced then
    answer = 'duplicate'
  elseif state ~= 'running' then
    answer = 'stale'
  elseif index > produced then
    answer = 'gap'
  else
    call('XADD', edge_key(request, edge), int(index + 1) .. '-0', 'h', header)
    local items, bytes, rows = string.match(written or '0|0|0|', '^(%d+)|(%d+)|(%d+)|')
    call('HSET', task, 'produced:' .. edge, int(index + 1), 'written:' .. edge,
      string.format('%.0f|%.0f|%.0f|%s', items + num_items, bytes + #header, rows + num_rows, now))
    if index == 0 then note_first_chunk(task, request, stage, epoch, edge, consumer, now) end
    if location ~= '' then call('HSET', location_key(request, edge), int(index), location) end
    local reader = call('HGET', task_key(request, consumer), 'owner')
    if reader and reader ~= '' then
      if #header <= MAX_NOTICE_HEADER then
        add_news(reader, 'h', header)
      else
        add_news(reader, 'p', request .. '|' .. edge .. '|' .. int(index))
      end
      if location ~= '' then add_news(reader, 'l', location) end
    end
    if event ~= '' then publish_event(event) end
    if asks == '1' then call('XADD', PREFIX .. 'boundaries', '*', 'e', event) end
  end
  if finish == '1' and (answer == 'ok' or answer == 'duplicate') then
    --rest
    finish_task(task, request, stage, epoch, state, now)
  end
  answers[#answers + 1] = answer
end
send_news()
return answers
