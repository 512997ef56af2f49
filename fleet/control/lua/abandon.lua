-- abandon: compares the leader's term; aborts requests to which no gateway has attached for the timeout since their last one was lost.
-- Answers "more" if others are due.
-- ARGV: leader, timeout us
pass_when_full()
local leader, timeout_us = unpack(ARGV)
if not is_leader(leader) then return 'not_leader' end
local due = call('ZRANGEBYSCORE', P .. 'without_gateway', '-inf', int(now_us() - tonumber(timeout_us)), 'LIMIT', 0, OVERDUE_SLICE)
for _, request in ipairs(due) do
  if close(request, 'aborted', 'aborted', 'the gateway that held the client is gone', '') == 'ended' then
    call('ZREM', P .. 'without_gateway', request)
  end
end
return #due == OVERDUE_SLICE and 'more' or 'ok'
