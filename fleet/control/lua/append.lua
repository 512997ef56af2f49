-- append: for each chunk, compares epoch, request live, that the task runs, and index = last + 1; writes the edge, the location, the
-- task's counts ("written": items|bytes|rows|time of the last chunk, us), the consumer's inbox, an event if there is one, and the task's
-- end if this chunk ends it ("finish"), and the boundary, if the conductor decides the walk to which the chunk's consumer changes ("asks"). The end of the request's last task closes it as finished. All chunks of the call for one consumer
-- are one entry of its inbox, without large headers.
-- A repeated chunk is answered "duplicate", also the chunk that ended the task.
-- ARGV: repeated 13: request, stage, epoch, edge, consumer stage, index, header, location, event, finish ("1"), item count, row count, asks
-- ("1")
local function first_of(r, s, epoch, e, consumer, now)
  local tk = task_key(r, s)
  call('HSET', tk, 'first_us:' .. e, now)
  trace(r, 'output', s, epoch, call('HGET', tk, 'owner'), e)
  if consumer == 'client' then count_us('first:' .. e, now - (call('HGET', P .. 'req:' .. r, 'created_us') or now)) end
end
local out, now = {}, int(now_us())
for i = 1, #ARGV, 13 do
  local r, s, epoch, e, consumer = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4]
  local index, header, loc, ev, finish = tonumber(ARGV[i + 5]), ARGV[i + 6], ARGV[i + 7], ARGV[i + 8], ARGV[i + 9]
  local tk = task_key(r, s)
  local t = call('HMGET', tk, 'epoch', 'produced:' .. e, 'state', 'written:' .. e)
  local answer = 'ok'
  local produced = tonumber(t[2] or '0')
  -- A running task belongs to a live request: `close` leaves no task running.
  if t[1] ~= epoch then answer = 'stale'
  elseif t[3] ~= 'running' and call('SISMEMBER', P .. 'live', r) == 0 then answer = 'ended'
  elseif index < produced then answer = 'duplicate'
  elseif t[3] ~= 'running' then answer = 'stale'
  elseif index > produced then answer = 'gap'
  else
    call('XADD', edge_key(r, e), int(index + 1) .. '-0', 'h', header)
    local items, bytes, rows = string.match(t[4] or '0|0|0|', '^(%d+)|(%d+)|(%d+)|')
    call('HSET', tk, 'produced:' .. e, int(index + 1), 'written:' .. e,
      string.format('%.0f|%.0f|%.0f|%s', items + ARGV[i + 10], bytes + #header, rows + ARGV[i + 11], now))
    if index == 0 then first_of(r, s, epoch, e, consumer, now) end
    if loc ~= '' then call('HSET', loc_key(r, e), int(index), loc) end
    local holder = call('HGET', task_key(r, consumer), 'owner')
    if holder and holder ~= '' then
      if #header <= MAX_NOTICE_HEADER then add_news(holder, 'h', header)
      else add_news(holder, 'p', r .. '|' .. e .. '|' .. int(index)) end
      if loc ~= '' then add_news(holder, 'l', loc) end
    end
    if ev ~= '' then event(ev) end
    if ARGV[i + 12] == '1' then call('XADD', P .. 'boundaries', '*', 'e', ev) end
  end
  if finish == '1' and (answer == 'ok' or answer == 'duplicate') then
    --rest
    finish_task(tk, r, s, epoch, t[3], now)
  end
  out[#out + 1] = answer
end
send_news()
return out
