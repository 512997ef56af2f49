-- leases: reads, at one moment of Redis's clock, the leases of all workers and gateways. Writes nothing.
-- Answers that time (us), then for each: its id, the deadline (us), and the lease's duration (us; "" for a worker whose record is gone).
local out = {int(now_us())}
local listed = call('ZRANGE', P .. 'workers', 0, -1, 'WITHSCORES')
for i = 1, #listed, 2 do
  out[#out + 1] = listed[i]
  out[#out + 1] = int(tonumber(listed[i + 1]))
  out[#out + 1] = call('HGET', P .. 'worker:' .. listed[i], 'lease_us') or ''
end
return out
