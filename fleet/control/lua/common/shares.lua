-- The order of the clients whose requests wait for a place.

-- The order of the clients whose requests wait at gateways for a place: fewest live requests by its
-- weight first, among equal ones the client whose last turn was longest ago. A client's name ends
-- in `*` and its weight, unless the weight is 1. One of weight 0 is in the background: its turn is
-- the last.
local TURN, LAST_TURN = 2147483648, '1e18'
local function weight_of(client)
  return tonumber(string.match(client, '%*([%d.]+)$')) or 1
end
local function is_background(client) return weight_of(client) == 0 end
local function turn_of(client, live)
  if is_background(client) then return LAST_TURN end
  return int(live * TURN / weight_of(client) + math.floor(now_us() / 1000) % TURN)
end
local function num_live_of(client)
  return tonumber(call('HGET', PREFIX .. 'live:clients', client) or '0')
end
-- Add to the number of a client's live requests. A new one costs the client its turn.
local function count_live(client, change)
  local live = call('HINCRBY', PREFIX .. 'live:clients', client, change)
  if live <= 0 then call('HDEL', PREFIX .. 'live:clients', client) end
  if change > 0 or is_background(client) then
    call('ZADD', PREFIX .. 'waiting', 'XX', turn_of(client, live), client)
  else
    local length = TURN / weight_of(client)
    call('ZADD', PREFIX .. 'waiting', 'XX', 'INCR', int(change * length), client)
  end
end
-- Return how many places stay free beside the requests of a client: none, unless it is in the
-- background. Then a quarter; and while other requests or voice sessions are live, all but one.
local function num_kept_free(client, live, bound)
  if not is_background(client) then return 0 end
  local own = num_live_of(client)
  local is_alone = live == own
    and call('ZCOUNT', PREFIX .. 'voices', int(now_us()), '+inf') == 0
  return own > 0 and not is_alone and tonumber(bound) or math.floor(bound / 4)
end
-- Return true if fewer clients than there are `free` places wait for an earlier turn than the
-- client's. One in the background has its turn while no other client waits.
local function has_turn(client, free)
  local waiting = PREFIX .. 'waiting'
  if is_background(client) then
    return call('ZCOUNT', waiting, '-inf', '(' .. LAST_TURN) == 0
  end
  if call('ZCARD', waiting) < free then return true end
  local turn = call('ZSCORE', waiting, client) or turn_of(client, num_live_of(client))
  return call('ZCOUNT', waiting, '-inf', '(' .. turn) < free
end
