-- ack: compares the consumer's epoch of each item; writes how much it consumed, which only grows, and gives the producer that credit.
-- The credit of the call for one producer is one entry of its inbox.
-- "delivered": the consumer, a gateway, has received everything, and its task ends; append ends the tasks of workers. If that was the
-- request's last task, the request is closed as finished.
-- "closed": the consumer reads no more, so its producer gets unlimited credit. A parked producer is granted again if it has credit now.
-- ARGV: repeated 8: request, consumer stage, epoch, edge, consumed, producer stage, delivered ("1"), closed ("1")
pass_when_full()
-- Write how much was consumed; return true if the producer is parked, and may have credit now.
local function give_credit(tk, r, e, consumed, before, producer, closed)
  if not closed and tonumber(consumed) <= tonumber(before or '0') then return false end
  call('HSET', tk, 'consumed:' .. e, consumed)
  if closed then call('HSET', tk, 'closed:' .. e, '1') end
  local p = call('HMGET', task_key(r, producer), 'owner', 'waits')
  local is_held = p[1] and p[1] ~= ''
  if is_held then add_news(p[1], 'a', r .. '|' .. e .. '|' .. (closed and ENDLESS or consumed)) end
  return not is_held and p[2]
end
local out = {}
for i = 1, #ARGV, 8 do
  local r, s, epoch, e, consumed, producer, delivered, closed = unpack(ARGV, i, i + 7)
  local tk, answer = task_key(r, s), 'ok'
  local t = call('HMGET', tk, 'epoch', 'consumed:' .. e, 'state')
  -- A running task belongs to a live request: `close` leaves no task running.
  if t[1] ~= epoch then answer = 'stale'
  elseif t[3] ~= 'running' and call('SISMEMBER', P .. 'live', r) == 0 then answer = 'ended'
  else
    local ends = delivered == '1'
    local is_parked = not ends and give_credit(tk, r, e, consumed, t[2], producer, closed == '1')
    if ends or is_parked then
      --rest
      if ends and not next_state('finished', t[3]) then answer = 'stale'
      else
        if ends then is_parked = give_credit(tk, r, e, consumed, t[2], producer, closed == '1') end
        if is_parked then unpark_if_due(r, producer) end
        if ends then
          move(tk, r, s, 'finished')
          call('HSET', tk, 'finished_us', int(now_us()))
          trace(r, 'delivered', s, epoch, remove_owner(tk, r, s))
          close_if_complete(r)
        end
      end
    end
  end
  out[#out + 1] = answer
end
send_news()
return out
