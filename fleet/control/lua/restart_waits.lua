-- restart_waits: compares the leader's term; lets the waits of all unclaimed grants, and of all
-- requests without a gateway, begin now: nobody has observed workers and gateways before, or
-- Redis's clock was set.
-- ARGV: leader
local leader = unpack(ARGV)
pass_when_full()
if not is_leader(leader) then return 'not_leader' end
local now = int(now_us())
for _, waits in ipairs({PREFIX .. 'granted', PREFIX .. 'without_gateway'}) do
  for _, member in ipairs(call('ZRANGE', waits, 0, -1)) do
    call('ZADD', waits, now, member)
  end
end
return 'ok'
