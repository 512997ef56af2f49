-- abandon: compares the leader's term; aborts requests to which no gateway has attached for the
-- timeout since their last one was lost. Answers "more" if others are due.
-- ARGV: leader, timeout_us
local leader, timeout_us = unpack(ARGV)
pass_when_full()
if not is_leader(leader) then return 'not_leader' end
local lost_before = int(now_us() - tonumber(timeout_us))
local without_gateway = PREFIX .. 'without_gateway'
local due = call('ZRANGEBYSCORE', without_gateway, '-inf', lost_before, 'LIMIT', 0, OVERDUE_SLICE)
local reason = 'the gateway that held the client is gone'
for _, request in ipairs(due) do
  if close(request, 'aborted', 'aborted', reason, '') == 'ended' then
    call('ZREM', without_gateway, request)
  end
end
return #due == OVERDUE_SLICE and 'more' or 'ok'
