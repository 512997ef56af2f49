-- set_route: gives an anchor's route a new generation, and records its span workers. Compares that
-- the anchor and the workers are listed, and that no worker is in the route of another listed
-- anchor. Writes the route and its generation to the anchor's hash, the anchor and the span to each
-- worker's, and releases the workers of the last route that are not in this one. A standby worker
-- that is used accepts work from then on.
-- ARGV: anchor, then repeated 2: worker, span (in the order of the layers)
local anchor = ARGV[1]
pass_when_full()
local anchor_key, generation_key = PREFIX .. 'worker:' .. anchor, PREFIX .. 'route_generation'
local function is_listed(worker)
  return worker ~= '' and call('ZSCORE', PREFIX .. 'workers', worker)
end
if not is_listed(anchor) then return {'stale'} end
local hops, is_in_route = {}, {}
for i = 2, #ARGV, 2 do
  local worker, span = unpack(ARGV, i, i + 1)
  if not is_listed(worker) then return {'gone', worker} end
  local other = call('HGET', PREFIX .. 'worker:' .. worker, 'anchor') or ''
  if other ~= anchor and is_listed(other) then return {'claimed', worker} end
  hops[#hops + 1] = {worker, span}
  is_in_route[worker] = true
end
local last_route = call('HGET', anchor_key, 'route')
for _, hop in ipairs(last_route and cjson.decode(last_route) or {}) do
  local worker = hop[1]
  local worker_key = PREFIX .. 'worker:' .. worker
  if not is_in_route[worker] and call('HGET', worker_key, 'anchor') == anchor then
    call('HSET', worker_key, 'anchor', '')
  end
end
-- Larger than any before, also if Redis has lost its last writes.
local generation = math.max(tonumber(call('GET', generation_key) or '0') + 1, now_us())
call('SET', generation_key, int(generation))
for _, hop in ipairs(hops) do
  local worker, span = unpack(hop)
  local worker_key = PREFIX .. 'worker:' .. worker
  call('HSET', worker_key, 'anchor', anchor, 'span', span)
  if call('HGET', worker_key, 'standby') == '1' then end_standby(worker) end
end
local route = #hops > 0 and cjson.encode(hops) or '[]'
call('HSET', anchor_key,
  'route', route, 'former_route', last_route or '', 'generation', int(generation))
return {'ok', int(generation)}
