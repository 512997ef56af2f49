-- take_turns: adds to the numbers of a gateway's requests that wait for a place, by client, and
-- forgets those of gateways that did not call for 2 s. Writes the order of the waiting clients.
-- Answers {"unlisted"} to a gateway of which nothing is known: it must name `all` of its waiting
-- requests. Else "ok", the number of free places, for each role how many more tasks its workers
-- would soon claim, and the clients whose turn it is, at most one for each place.
-- ARGV: gateway, bound, all ("1"), roles, then repeated 2: client, change (of its number)
local gateway, bound, all, roles = unpack(ARGV, 1, 4)
local MAX_ABSENT_US, WAITING_MS, MAX_TURNS = 2000000, 60000, 100
pass_when_full()
local waiting, numbers = PREFIX .. 'waiting', PREFIX .. 'waiting:numbers'
local gateways = PREFIX .. 'waiting:gateways'
local function numbers_at(any_gateway) return PREFIX .. 'waiting:at:' .. any_gateway end
local function add(key, field, change)
  local sum = call('HINCRBY', key, field, change)
  if sum <= 0 then call('HDEL', key, field) end
  return sum
end
local function add_waiting(client, change)
  if add(numbers, client, change) > 0 then
    call('ZADD', waiting, 'NX', turn_of(client, num_live_of(client)), client)
  else
    call('ZREM', waiting, client)
  end
  add(numbers, '*', change)
end
local function forget(any_gateway)
  local known = call('HGETALL', numbers_at(any_gateway))
  for i = 1, #known, 2 do
    local client, number = known[i], known[i + 1]
    add_waiting(client, -tonumber(number))
  end
  call('DEL', numbers_at(any_gateway))
  call('ZREM', gateways, any_gateway)
end
local now = now_us()
for _, absent in ipairs(call('ZRANGEBYSCORE', gateways, '-inf', int(now - MAX_ABSENT_US))) do
  forget(absent)
end
if all == '1' then
  forget(gateway)
elseif not call('ZSCORE', gateways, gateway) then
  return {'unlisted'}
end
for i = 5, #ARGV, 2 do
  local client, change = unpack(ARGV, i, i + 1)
  add(numbers_at(gateway), client, change)
  add_waiting(client, change)
end
if call('EXISTS', numbers_at(gateway)) == 1 then
  call('ZADD', gateways, int(now), gateway)
else
  call('ZREM', gateways, gateway)
end
for _, key in ipairs({waiting, numbers, gateways}) do
  call('PEXPIRE', key, WAITING_MS)
end
-- What a gateway has reported outlives the sums that it is part of.
call('PEXPIRE', numbers_at(gateway), 2 * WAITING_MS)
local live = call('SCARD', PREFIX .. 'live')
local free = tonumber(bound) - live
local answer = {'ok', free}
for _, soon in ipairs(num_claimed_soon(split(roles), live)) do
  answer[#answer + 1] = soon
end
local turns = free > 0 and call('ZRANGE', waiting, 0, math.min(free, MAX_TURNS) - 1) or {}
for _, client in ipairs(turns) do
  if not is_background(client)
    or has_turn(client, free) and free > num_kept_free(client, live, bound) then
    answer[#answer + 1] = client
  end
end
return answer
