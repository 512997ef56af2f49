-- record_metrics: adds a gateway's counts to the current step of the fleet's time series, and sets
-- its gauges, which all gateways read alike. A count of refusals, `refused:CODE` or
-- `refused:CODE:LIMIT`, is one entry of the journal too.
-- ARGV: gateway, num_counters, then repeated 2: field, value (the counters first)
local gateway, num_counters = unpack(ARGV, 1, 2)
local key = PREFIX .. 'series:' .. int(math.floor(now_us() / SERIES_STEP_US))
for i = 3, #ARGV, 2 do
  local field, value = unpack(ARGV, i, i + 1)
  local is_counter = (i - 1) / 2 <= tonumber(num_counters)
  local code, limit = string.match(field, '^refused:([^:]+):?(.*)$')
  if code then
    field = 'refused:' .. code
    write_journal('refused', 'worker', gateway, 'code', code, 'detail', limit, 'count', value)
  end
  if is_counter then
    call('HINCRBY', key, field, value)
  else
    call('HSET', key, field, value)
  end
end
call('EXPIRE', key, SERIES_KEPT_S)
return 'ok'
