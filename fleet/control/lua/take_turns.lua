-- take_turns: adds to the numbers of a gateway's requests that wait for a place, by client, and forgets those of gateways that did not
-- call for 2 s. Writes the order of the waiting clients.
-- Answers {"unlisted"} to a gateway of which nothing is known: it must name `all` of its waiting requests. Else "ok", the number of
-- free places, for each role how many more tasks its workers would soon claim, and the clients whose turn it is, at most one for each place.
-- ARGV: gateway, bound, all ("1"), roles, then repeated 2: client, number to add
pass_when_full()
local MAX_ABSENT_US, WAITING_MS, MAX_TURNS = 2000000, 60000, 100
local gateway, bound, all, roles = unpack(ARGV)
local waiting, numbers, gateways = P .. 'waiting', P .. 'waiting:numbers', P .. 'waiting:gateways'
local function at(g) return P .. 'waiting:at:' .. g end
local function add(key, field, n)
  local sum = call('HINCRBY', key, field, n)
  if sum <= 0 then call('HDEL', key, field) end
  return sum
end
local function add_waiting(client, n)
  if add(numbers, client, n) > 0 then call('ZADD', waiting, 'NX', turn_of(client, num_live_of(client)), client)
  else call('ZREM', waiting, client) end
  add(numbers, '*', n)
end
local function forget(g)
  local known = call('HGETALL', at(g))
  for i = 1, #known, 2 do add_waiting(known[i], -tonumber(known[i + 1])) end
  call('DEL', at(g))
  call('ZREM', gateways, g)
end
local now = now_us()
for _, g in ipairs(call('ZRANGEBYSCORE', gateways, '-inf', int(now - MAX_ABSENT_US))) do forget(g) end
if all == '1' then forget(gateway)
elseif not call('ZSCORE', gateways, gateway) then return {'unlisted'} end
for i = 5, #ARGV, 2 do
  add(at(gateway), ARGV[i], ARGV[i + 1])
  add_waiting(ARGV[i], ARGV[i + 1])
end
if call('EXISTS', at(gateway)) == 1 then call('ZADD', gateways, int(now), gateway) else call('ZREM', gateways, gateway) end
for _, key in ipairs({waiting, numbers, gateways}) do call('PEXPIRE', key, WAITING_MS) end
-- What a gateway has reported outlives the sums that it is part of.
call('PEXPIRE', at(gateway), 2 * WAITING_MS)
local live = call('SCARD', P .. 'live')
local free, answer = tonumber(bound) - live, {'ok'}
answer[2] = free
for _, soon in ipairs(num_claimed_soon(split(roles), live)) do answer[#answer + 1] = soon end
local turns = free > 0 and call('ZRANGE', waiting, 0, math.min(free, MAX_TURNS) - 1) or {}
for _, client in ipairs(turns) do answer[#answer + 1] = client end
return answer
