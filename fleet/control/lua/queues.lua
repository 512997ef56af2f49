-- queues: reads, at one moment of Redis's clock, the streams of roles. Writes nothing.
-- Answers per role: unclaimed entries, unclaimed entries that no worker has read, age of the oldest in us (0 without one).
-- ARGV: roles
local out, now = {}, now_us()
for i, role in ipairs(ARGV) do
  local depth, unread, age = 0, 0, 0
  for _, first in ipairs({true, false}) do
    local key = role_key(role, first)
    local entries = call('XLEN', key)
    if entries > 0 then
      -- XINFO reports no `lag` before Redis 7, nor once entries are deleted, as claimed ones are.
      unread = unread + #call('XRANGE', key, '(' .. last_read(key), '+')
      local oldest = call('XRANGE', key, '-', '+', 'COUNT', 1)[1][1]
      age = math.max(now - tonumber(string.match(oldest, '^(%d+)')) * 1000, age)
      depth = depth + entries
    end
  end
  out[i] = {depth, unread, int(age)}
end
return out
