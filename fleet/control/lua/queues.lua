-- queues: reads, at one moment of Redis's clock, the role streams. Writes nothing.
-- Answers per role: unclaimed entries, unclaimed entries not yet delivered to a worker, age of the oldest in us (0 without one).
-- ARGV: roles
local out, now = {}, now_us()
for i, role in ipairs(ARGV) do
  local key, depth, lag, age = P .. 'role:' .. role, 0, 0, 0
  depth = call('XLEN', key)
  if depth > 0 then
    -- XINFO reports no `lag` before Redis 7, nor once entries are deleted, as claimed ones are.
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
