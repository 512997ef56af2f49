-- ack: compares the consumer's epoch of each item; writes how much it consumed, which only grows, and gives the producer that credit.
-- The credit of the call for one producer is one entry of its inbox.
-- "delivered": the consumer, a gateway, has received everything, and its task ends; append ends the tasks of workers. If that was the
-- request's last task, the request is closed as finished.
-- "closed": the consumer reads no more, so its producer gets unlimited credit. A parked producer is granted again if it has credit now.
-- ARGV: repeated 8: request, consumer stage, epoch, edge, consumed, producer stage, delivered ("1"), closed ("1")
pass_when_full()
local out = {}
for i = 1, #ARGV, 8 do
  local r, s, epoch, e, consumed, producer = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4], ARGV[i + 5]
  local tk = task_key(r, s)
  local t = call('HMGET', tk, 'epoch', 'consumed:' .. e, 'state')
  -- A running task belongs to a live request: `close` leaves no task running.
  if t[1] ~= epoch then out[#out + 1] = 'stale'
  elseif t[3] ~= 'running' and call('SISMEMBER', P .. 'live', r) == 0 then out[#out + 1] = 'ended'
  elseif ARGV[i + 6] == '1' and not next_state('finished', t[3]) then out[#out + 1] = 'stale'
  else
    local closed = ARGV[i + 7] == '1'
    if closed or tonumber(consumed) > tonumber(t[2] or '0') then
      call('HSET', tk, 'consumed:' .. e, consumed)
      if closed then call('HSET', tk, 'closed:' .. e, '1') end
      local p = call('HMGET', task_key(r, producer), 'owner', 'waits')
      if p[1] and p[1] ~= '' then add_news(p[1], 'a', r .. '|' .. e .. '|' .. (closed and ENDLESS or consumed))
      elseif p[2] then unpark_if_due(r, producer) end
    end
    if ARGV[i + 6] == '1' then
      move(tk, r, s, 'finished')
      call('HSET', tk, 'finished_us', int(now_us()))
      trace(r, 'delivered', s, epoch, remove_owner(tk, r, s))
      close_if_complete(r)
    end
    out[#out + 1] = 'ok'
  end
end
send_news()
return out
