-- lead: compares that there is no leader, or that the candidate is the leader; writes the leader's lease. A new term differs from every
-- earlier one. A candidate that finds more of the leader's lease left than leases last shortens it: Redis's clock was set back, and the
-- leader may be dead. A lease of 1 ms gives up the lead; otherwise it lapses, which the next leader's first call writes to the log.
-- ARGV: candidate, held value ("" if not leading), lease ms
pass_when_full()
local candidate, held, lease = unpack(ARGV)
local current = call('GET', P .. 'conductor')
if current and current == held then
  call('PEXPIRE', P .. 'conductor', lease)
  if lease == '1' then call('DEL', P .. 'conductor:last') end
  return held
end
if current then
  if held == '' and call('PTTL', P .. 'conductor') > tonumber(lease) then call('PEXPIRE', P .. 'conductor', lease) end
  return ''
end
local value = candidate .. '|' .. int(now_us())
call('SET', P .. 'conductor', value, 'PX', lease)
local last = string.match(call('GETSET', P .. 'conductor:last', candidate) or '', '^.+')
if last and last ~= candidate then
  log_fact('warning', 'conductor', last, '', '', 'the lead of conductor ' .. last .. ' lapsed, and no end of its process was ' ..
    'seen; ' .. candidate .. ' leads now')
end
return value
