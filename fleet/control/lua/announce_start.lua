-- announce_start: a worker of the role is starting: its process announces itself while it loads, its keeper before (then `begins` is
-- given, and `place` the keeper's). Compares, for a keeper, that the `child` has neither announced itself nor joined yet. Writes until
-- when the start counts, in place of `instead_of`: the keeper's announcement that a process continues, or a dead child's. Each of a
-- keeper's, and a process's that continues none, is one more try; a try without a worker that joins has failed. Lapsed starts go.
-- ARGV: role, place (host:pid), lease us, instead_of, child, workers that the deployment has of the role ("" unknown), begins: us
-- until the keeper starts it ("" for a process)
local role, place, lease, instead_of, child, workers, begins = unpack(ARGV)
local key, now = availability_key(role), now_us()
if child ~= '' then
  if call('HEXISTS', key, 'start:' .. child) == 1 then return 'begun' end
  for _, w in ipairs(call('ZRANGE', P .. 'workers', 0, -1)) do
    if string.find(w, '@' .. child .. ':', 1, true) then return 'begun' end
  end
end
local fields, continues = call('HGETALL', key), false
for i = 1, #fields, 2 do
  local of = string.match(fields[i], '^start:(.+)$')
  if of == place or of == instead_of then continues = true end
  if of and (of == instead_of or tonumber(fields[i + 1]) <= now) then call('HDEL', key, fields[i]) end
end
if begins ~= '' or not continues then call('HINCRBY', key, 'tries', 1) end
if begins ~= '' then call('HSET', key, 'next_us', int(now + tonumber(begins))) end
if workers ~= '' then call('HSET', key, 'workers', workers) end
call('HSET', key, 'start:' .. place, int(now + tonumber(lease)))
return 'ok'
