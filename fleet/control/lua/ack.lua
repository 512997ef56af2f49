-- ack: compares the consumer's epoch of each item; writes how much it consumed, which only grows,
-- and gives the producer that credit. The credit of the call for one producer is one entry of its
-- inbox.
-- "delivered": the consumer, a gateway, has received everything, and its task ends; append ends the
-- tasks of workers. If that was the request's last task, the request is closed as finished.
-- "closed": the consumer reads no more, so its producer gets unlimited credit. A parked producer is
-- granted again if it has credit now.
-- ARGV: repeated 8: request, stage (the consumer), epoch, edge, consumed, producer (its stage),
-- delivered ("1"), closed ("1")
pass_when_full()
-- Write how much was consumed; return true if the producer is parked, and may have credit now.
local function give_credit(task, request, edge, consumed, consumed_before, producer, is_closed)
  if not is_closed and tonumber(consumed) <= tonumber(consumed_before or '0') then return false end
  call('HSET', task, 'consumed:' .. edge, consumed)
  if is_closed then call('HSET', task, 'closed:' .. edge, '1') end
  local owner, waits = unpack(call('HMGET', task_key(request, producer), 'owner', 'waits'))
  if owner and owner ~= '' then
    add_news(owner, 'a', request .. '|' .. edge .. '|' .. (is_closed and ENDLESS or consumed))
    return false
  end
  return waits
end
local answers = {}
for i = 1, #ARGV, 8 do
  local request, stage, epoch, edge, consumed, producer, delivered, closed = unpack(ARGV, i, i + 7)
  local is_delivered, task, answer = delivered == '1', task_key(request, stage), 'ok'
  local present_epoch, consumed_before, state = unpack(
    call('HMGET', task, 'epoch', 'consumed:' .. edge, 'state'))
  local function credit()
    return give_credit(task, request, edge, consumed, consumed_before, producer, closed == '1')
  end
  -- A running task belongs to a live request: `close` leaves no task running.
  if present_epoch ~= epoch then
    answer = 'stale'
  elseif state ~= 'running' and call('SISMEMBER', PREFIX .. 'live', request) == 0 then
    answer = 'ended'
  else
    local is_parked = not is_delivered and credit()
    if is_delivered or is_parked then
      --rest
      if is_delivered and not next_state('finished', state) then
        answer = 'stale'
      elseif is_parked or credit() then
        unpark_if_due(request, producer)
      end
      if is_delivered and answer == 'ok' then
        move(task, request, stage, 'finished', 'finished_us', int(now_us()))
        trace(request, 'delivered', stage, epoch, remove_owner(task, request, stage))
        close_if_complete(request)
      end
    end
  end
  answers[#answers + 1] = answer
end
send_news()
return answers
