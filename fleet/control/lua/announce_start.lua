-- announce_start: a worker of the role is starting, in the process `place` (host:pid) or soon below it (its keeper). Compares, for a
-- keeper, that its `child` neither announces itself nor has joined yet. Writes until when the start counts, and one more try unless
-- it continues that of `instead_of`, the keeper's: a try that ends without a worker that joins has failed. Starts that lapsed go.
-- ARGV: role, place, lease us, instead_of, child, workers that the deployment has of the role ("" unknown), us until the start begins
local role, place, lease, instead_of, child, workers, begins = unpack(ARGV)
local key, now = availability_key(role), now_us()
if child ~= '' then
  if call('HEXISTS', key, 'start:' .. child) == 1 then return 'begun' end
  for _, w in ipairs(call('ZRANGE', P .. 'workers', 0, -1)) do
    if string.find(w, '@' .. child .. ':', 1, true) then return 'begun' end
  end
end
local fields, is_new = call('HGETALL', key), true
for i = 1, #fields, 2 do
  local of = string.match(fields[i], '^start:(.+)$')
  if of == place or of == instead_of then is_new = false end
  if of and (of == instead_of or tonumber(fields[i + 1]) <= now) then call('HDEL', key, fields[i]) end
end
if is_new then call('HINCRBY', key, 'tries', 1) end
call('HSET', key, 'start:' .. place, int(now + tonumber(lease)))
if workers ~= '' then call('HSET', key, 'workers', workers) end
if begins ~= '' then call('HSET', key, 'next_us', int(now + tonumber(begins))) end
return 'ok'
