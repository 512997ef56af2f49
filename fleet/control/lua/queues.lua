-- queues: reads, at one moment of Redis's clock, the streams of roles. Writes nothing.
-- Answers per role: unclaimed entries, unclaimed entries that no worker has read, age of the oldest
-- in us (0 without one).
-- ARGV: roles
local roles = {unpack(ARGV)}
local answers, now = {}, now_us()
for i, role in ipairs(roles) do
  local depth, unread, age_us = 0, 0, 0
  for _, first in ipairs({true, false}) do
    local key = role_key(role, first)
    local num_entries = call('XLEN', key)
    if num_entries > 0 then
      -- XINFO reports no `lag` before Redis 7, nor once entries are deleted, as claimed ones are.
      unread = unread + #call('XRANGE', key, '(' .. last_read(key), '+')
      local oldest = call('XRANGE', key, '-', '+', 'COUNT', 1)[1][1]
      local added_ms = tonumber(string.match(oldest, '^(%d+)'))
      age_us = math.max(now - added_ms * 1000, age_us)
      depth = depth + num_entries
    end
  end
  answers[i] = {depth, unread, int(age_us)}
end
return answers
