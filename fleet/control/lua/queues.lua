-- queues: reads, at one moment of Redis's clock, what waits in the role streams. Writes nothing.
-- Answers per role: entries not claimed, of these not yet delivered to a worker, age of the oldest in us (0 without one).
-- ARGV: roles
local out, now = {}, now_us()
for i, role in ipairs(ARGV) do
  local key, depth, lag, age = P .. 'role:' .. role, 0, 0, 0
  depth = call('XLEN', key)
  if depth > 0 then
    -- XINFO's own `lag` came with Redis 7, and is unknown to it once entries are deleted; ours are deleted when claimed.
    local delivered = '-'
    local groups = redis.pcall('XINFO', 'GROUPS', key)
    for _, group in ipairs(groups) do
      for f = 1, #group, 2 do
        if group[f] == 'last-delivered-id' then delivered = '(' .. group[f + 1] end
      end
    end
    lag = #call('XRANGE', key, delivered, '+')
    local first = call('XRANGE', key, '-', '+', 'COUNT', 1)[1][1]
    age = math.max(now - tonumber(string.match(first, '^(%d+)')) * 1000, 0)
  end
  out[i] = {depth, lag, int(age)}
end
return out
