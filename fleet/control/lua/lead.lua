-- lead: compares that there is no leader, or that the candidate is the leader; writes the leader's
-- lease. A new term differs from every earlier one. A candidate that finds more of the leader's
-- lease left than leases last shortens it: Redis's clock was set back, and the leader may be dead.
-- A lease of 1 ms gives up the lead; otherwise it lapses, which the next leader's first call writes
-- to the log.
-- ARGV: candidate, held (value; "" if not leading), lease_ms
local candidate, held, lease_ms = unpack(ARGV)
pass_when_full()
local leader_key, last_key = PREFIX .. 'conductor', PREFIX .. 'conductor:last'
local current = call('GET', leader_key)
if current and current == held then
  call('PEXPIRE', leader_key, lease_ms)
  if lease_ms == '1' then call('DEL', last_key) end
  return held
end
if current then
  if held == '' and call('PTTL', leader_key) > tonumber(lease_ms) then
    call('PEXPIRE', leader_key, lease_ms)
  end
  return ''
end
local value = candidate .. '|' .. int(now_us())
call('SET', leader_key, value, 'PX', lease_ms)
local last = string.match(call('GETSET', last_key, candidate) or '', '^.+')
if last ~= candidate then write_journal('led', 'worker', candidate) end
if last and last ~= candidate then
  log_fact('warning', 'conductor', last, '', '', 'the lead of conductor ' .. last ..
    ' lapsed, and no end of its process was seen; ' .. candidate .. ' leads now')
end
return value
