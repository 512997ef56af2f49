-- leases: reads, at one moment of Redis's clock, the leases of all workers and gateways. Writes
-- nothing. Answers that time (us), then for each: its id, the deadline (us), and the lease's
-- duration (us; "" for a worker whose record is gone).
-- ARGV: none
local answer = {int(now_us())}
local listed = call('ZRANGE', PREFIX .. 'workers', 0, -1, 'WITHSCORES')
for i = 1, #listed, 2 do
  local worker, deadline = listed[i], listed[i + 1]
  answer[#answer + 1] = worker
  answer[#answer + 1] = int(tonumber(deadline))
  answer[#answer + 1] = call('HGET', PREFIX .. 'worker:' .. worker, 'lease_us') or ''
end
return answer
