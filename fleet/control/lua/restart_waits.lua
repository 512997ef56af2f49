-- restart_waits: compares the leader's term; lets the waits of all unclaimed grants, and of all requests without a gateway, begin now:
-- nobody has observed workers and gateways before, or Redis's clock was set.
-- ARGV: leader
pass_when_full()
local leader = ARGV[1]
if not is_leader(leader) then return 'not_leader' end
local now = int(now_us())
for _, waiting in ipairs({P .. 'granted', P .. 'without_gateway'}) do
  for _, member in ipairs(call('ZRANGE', waiting, 0, -1)) do call('ZADD', waiting, now, member) end
end
return 'ok'
