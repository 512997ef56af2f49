-- record_metrics: adds a gateway's counts to the current step of the fleet's time series, and sets
-- its gauges, which all gateways read alike. A count of refusals, `refused:CODE` or
-- `refused:CODE:LIMIT`, is one entry of the journal too, with the ids of requests and the message.
-- ARGV: gateway, num_refused, num_counters, then repeated 2: field, value (first num_refused times
-- the name of a count of refusals and `ID,ID|MESSAGE`, then the counters, then the gauges)
local gateway, num_refused, num_counters = unpack(ARGV, 1, 3)
local refused, first = {}, 4 + 2 * tonumber(num_refused)
for i = 4, first - 1, 2 do
  local field, value = unpack(ARGV, i, i + 1)
  refused[field] = value
end
local key = PREFIX .. 'series:' .. int(math.floor(now_us() / SERIES_STEP_US))
for i = first, #ARGV, 2 do
  local field, value = unpack(ARGV, i, i + 1)
  local is_counter = (i - first) / 2 < tonumber(num_counters)
  local code, limit = string.match(field, '^refused:([^:]+):?(.*)$')
  if code then
    local requests, message = string.match(refused[field] or '', '^([^|]*)|?(.*)$')
    write_journal('refused', 'worker', gateway, 'code', code, 'detail', limit, 'count', value,
      'requests', requests, 'message', string.sub(message, 1, MAX_DETAIL_BYTES))
    field = 'refused:' .. code
  end
  if is_counter then
    call('HINCRBY', key, field, value)
  else
    call('HSET', key, field, value)
  end
end
call('EXPIRE', key, SERIES_KEPT_S)
return 'ok'
