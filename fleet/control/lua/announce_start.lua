-- announce_start: records that a worker of the role is starting. Its process announces itself while it loads; before that, its keeper
-- does (`begins` is set, and `place` is the keeper's). For a keeper, compares that `child` has neither announced itself nor joined yet.
-- Writes until when the start counts, replacing the announcement of `instead_of`: the keeper whose start this process continues, or a
-- dead child. Each start of a keeper (`number`; a repeated call has the same one), and a process's own start that continues none, is
-- one more try; a try whose worker does not join has failed, unless it was `stopped`. Lapsed starts are deleted. The count of tries is
-- reset by a new keeper, and after a minute without an announced start.
-- ARGV: role, place (host:pid), lease us, instead_of, child, workers that the deployment has of the role ("" unknown), begins: us
-- until the keeper starts it ("" for a process), number of the keeper's start, stopped ("1": `instead_of` did not fail), percentage of
-- the weights that is loaded ("" unknown)
local role, place, lease, instead_of, child, workers, begins, number, stopped, loaded = unpack(ARGV)
local key, now = availability_key(role), now_us()
if child ~= '' then
  if call('HEXISTS', key, 'start:' .. child) == 1 or call('HEXISTS', P .. 'places', child) == 1 then return 'begun' end
end
local fields, continues, any = call('HGETALL', key), false, false
for i = 1, #fields, 2 do
  local of = string.match(fields[i], '^start:(.+)$')
  if of then
    local ends, counted = start_of(fields[i + 1])
    if begins ~= '' then continues = continues or (of == place and counted == number)
    else continues = continues or of == place or of == instead_of end
    if of == instead_of then withdraw_start(key, of, stopped ~= '1')
    elseif ends <= now then call('HDEL', key, fields[i]) end
    any = any or ends > now
  end
end
local quiet = now - tonumber(call('HGET', key, 'tried_us') or '0') > FORGET_TRIES_US
if not any and (quiet or (begins ~= '' and instead_of == '')) then call('HDEL', key, 'tries') end
if not continues then call('HINCRBY', key, 'tries', 1) end
if begins ~= '' then call('HSET', key, 'next_us', int(now + tonumber(begins))) end
if workers ~= '' then call('HSET', key, 'workers', workers) end
call('HSET', key, 'start:' .. place, int(now + tonumber(lease)) .. ' ' .. number .. ' ' .. loaded, 'tried_us', int(now))
return 'ok'
