-- backlog: reads how many requests wait at gateways for a place, at how many gateways, how many are
-- live, and the highest number of ends a second in the present step of the time series and the two
-- before it, in thousandths. Writes nothing.
-- ARGV: none
local now, rate = now_us(), 0
local step = math.floor(now / SERIES_STEP_US)
for back = 0, 2 do
  local series, ended = PREFIX .. 'series:' .. int(step - back), 0
  for _, state in ipairs({'finished', 'failed', 'aborted'}) do
    ended = ended + tonumber(call('HGET', series, 'ended:' .. state) or '0')
  end
  local took_us = back > 0 and SERIES_STEP_US or math.max(now - step * SERIES_STEP_US, 1000000)
  rate = math.max(rate, ended * 1000000 / took_us)
end
local num_waiting = tonumber(call('HGET', PREFIX .. 'waiting:numbers', '*') or '0')
local num_gateways = call('ZCARD', PREFIX .. 'waiting:gateways')
local num_live = call('SCARD', PREFIX .. 'live')
return {num_waiting, num_gateways, num_live, int(rate * 1000)}
