-- record_metrics: adds a gateway's counts to the current step of the fleet's time series, and sets its gauges, which all gateways read
-- alike.
-- ARGV: number of counters, then field/value pairs, the counters first
local key = P .. 'series:' .. int(math.floor(now_us() / SERIES_STEP_US))
local counters = tonumber(ARGV[1])
for i = 1, (#ARGV - 1) / 2 do
  local field, value = ARGV[2 * i], ARGV[2 * i + 1]
  if i <= counters then call('HINCRBY', key, field, value) else call('HSET', key, field, value) end
end
call('EXPIRE', key, SERIES_KEPT_S)
return 'ok'
