-- record_metrics: adds a gateway's counts to the current step of the fleet's time series, and sets
-- its gauges, which all gateways read alike.
-- ARGV: num_counters, then repeated 2: field, value (the counters first)
local num_counters = tonumber(ARGV[1])
local key = PREFIX .. 'series:' .. int(math.floor(now_us() / SERIES_STEP_US))
for i = 2, #ARGV, 2 do
  local field, value = unpack(ARGV, i, i + 1)
  local is_counter = i / 2 <= num_counters
  if is_counter then
    call('HINCRBY', key, field, value)
  else
    call('HSET', key, field, value)
  end
end
call('EXPIRE', key, SERIES_KEPT_S)
return 'ok'
