-- sweep: compares the leader's term; deletes audio of ended requests whose time is over: where one
-- key in ten has expired, Redis's own expiry hardly looks. `early`: number of the oldest that are
-- deleted at least, even if their time is not over. Answers "more" while others are due.
-- ARGV: leader, early
local leader, early = unpack(ARGV)
early = tonumber(early)
pass_when_full()
if not is_leader(leader) then return 'not_leader' end
local retained = PREFIX .. 'retained_audio'
local due = call('ZRANGEBYSCORE', retained, '-inf', int(now_us()), 'LIMIT', 0, SWEEP_SLICE)
if #due < early then due = call('ZRANGE', retained, 0, early - 1) end
for _, entry in ipairs(due) do
  local request, edges = string.match(entry, '^(.-)|(.*)$')
  call('UNLINK', PREFIX .. 'req:' .. request .. ':blob')
  for _, edge in ipairs(split(edges)) do
    call('UNLINK', edge_key(request, edge))
  end
  call('ZREM', retained, entry)
end
return #due == SWEEP_SLICE and 'more' or 'ok'
