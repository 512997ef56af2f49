-- The order of the clients whose requests wait for a place.

-- The order of the clients whose requests wait at gateways for a place: fewest live requests by its
-- weight first, among equal ones the client whose last turn was longest ago. A client's name ends
-- in `*` and its weight, unless the weight is 1.
local TURN = 2147483648
local function turn_length(client)
  return TURN / (tonumber(string.match(client, '%*([%d.]+)$')) or 1)
end
local function turn_of(client, live)
  return int(live * turn_length(client) + math.floor(now_us() / 1000) % TURN)
end
local function num_live_of(client)
  return tonumber(call('HGET', PREFIX .. 'live:clients', client) or '0')
end
-- Add to the number of a client's live requests. A new one costs the client its turn.
local function count_live(client, change)
  local live = call('HINCRBY', PREFIX .. 'live:clients', client, change)
  if live <= 0 then call('HDEL', PREFIX .. 'live:clients', client) end
  if change > 0 then
    call('ZADD', PREFIX .. 'waiting', 'XX', turn_of(client, live), client)
  else
    call('ZADD', PREFIX .. 'waiting', 'XX', 'INCR', int(change * turn_length(client)), client)
  end
end
-- Return true if fewer clients than there are `free` places wait for an earlier turn than the
-- client's.
local function has_turn(client, free)
  local waiting = PREFIX .. 'waiting'
  if call('ZCARD', waiting) < free then return true end
  local turn = call('ZSCORE', waiting, client) or turn_of(client, num_live_of(client))
  return call('ZCOUNT', waiting, '-inf', '(' .. turn) < free
end
