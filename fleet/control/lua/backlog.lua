-- backlog: reads how many requests wait at gateways for a place, at how many gateways, how many are live, and the highest number of ends
-- a second in the present step of the time series and the two before it, in thousandths. Writes nothing.
-- ARGV: none
local now, rate = now_us(), 0
local step = math.floor(now / SERIES_STEP_US)
for back = 0, 2 do
  local ended = 0
  for _, state in ipairs({'finished', 'failed', 'aborted'}) do
    ended = ended + tonumber(call('HGET', P .. 'series:' .. int(step - back), 'ended:' .. state) or '0')
  end
  local took_us = back > 0 and SERIES_STEP_US or math.max(now - step * SERIES_STEP_US, 1000000)
  rate = math.max(rate, ended * 1000000 / took_us)
end
return {tonumber(call('HGET', P .. 'waiting:numbers', '*') or '0'), call('ZCARD', P .. 'waiting:gateways'), call('SCARD', P .. 'live'),
  int(rate * 1000)}
