-- lead: compares that nobody leads, or that we do; writes the leader's lease. A new term is above every earlier one.
-- ARGV: candidate, held value ("" if not leading), lease ms
local candidate, held, lease = unpack(ARGV)
local current = call('GET', P .. 'conductor')
if current and current == held then
  call('PEXPIRE', P .. 'conductor', lease)
  return held
end
if current then return '' end
local value = candidate .. '|' .. int(now_us())
call('SET', P .. 'conductor', value, 'PX', lease)
return value
