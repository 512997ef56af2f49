-- set_route: gives an anchor's route a new generation, and records its span workers. Compares that the anchor and the workers are listed,
-- and that no worker is in the route of another listed anchor. Writes the route and its generation to the anchor's hash, the anchor and
-- the span to each worker's, and releases the workers of the last route that are not in this one. A standby worker that is used accepts
-- work from then on.
-- ARGV: anchor, then worker/span pairs in the order of the layers
pass_when_full()
local anchor = ARGV[1]
local function is_listed(w) return w ~= '' and call('ZSCORE', P .. 'workers', w) end
if not is_listed(anchor) then return {'stale'} end
local hops, mine = {}, {}
for i = 2, #ARGV, 2 do
  local w = ARGV[i]
  if not is_listed(w) then return {'gone', w} end
  local other = call('HGET', P .. 'worker:' .. w, 'anchor') or ''
  if other ~= anchor and is_listed(other) then return {'claimed', w} end
  hops[#hops + 1], mine[w] = {w, ARGV[i + 1]}, true
end
local last = call('HGET', P .. 'worker:' .. anchor, 'route')
for _, hop in ipairs(last and cjson.decode(last) or {}) do
  local key = P .. 'worker:' .. hop[1]
  if not mine[hop[1]] and call('HGET', key, 'anchor') == anchor then call('HSET', key, 'anchor', '') end
end
-- Larger than any before, also if Redis has lost its last writes.
local generation = math.max(tonumber(call('GET', P .. 'route_generation') or '0') + 1, now_us())
call('SET', P .. 'route_generation', int(generation))
for _, hop in ipairs(hops) do
  local key = P .. 'worker:' .. hop[1]
  call('HSET', key, 'anchor', anchor, 'span', hop[2])
  if call('HGET', key, 'standby') == '1' then end_standby(hop[1]) end
end
call('HSET', P .. 'worker:' .. anchor, 'route', #hops > 0 and cjson.encode(hops) or '[]', 'former_route', last or '', 'generation',
  int(generation))
return {'ok', int(generation)}
