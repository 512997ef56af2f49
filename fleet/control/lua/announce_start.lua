-- announce_start: records that a worker of the role is starting. Its process announces itself while
-- it loads; before that, its keeper does (`begins_us` is set, and `place` is the keeper's). For a
-- keeper, compares that `child` has neither announced itself nor joined yet. Writes until when the
-- start counts, replacing the announcement of `instead_of`: the keeper whose start this process
-- continues, or a dead child. Each start of a keeper (`number`; a repeated call has the same one),
-- and a process's own start that continues none, is one more try; a try whose worker does not join
-- has failed, unless it was `stopped`. Lapsed starts are deleted. The count of tries is reset by a
-- new keeper, and after a minute without an announced start.
-- ARGV: role, place (host:pid), lease_us, instead_of, child, workers (that the deployment has of
-- the role; "" unknown), begins_us (until the keeper starts it; "" for a process), number (of the
-- keeper's start), stopped ("1": `instead_of` did not fail), loaded (percentage of the weights; ""
-- unknown)
local role, place, lease_us, instead_of, child, workers, begins_us, number, stopped, loaded =
  unpack(ARGV)
local key, now = availability_key(role), now_us()
if child ~= '' then
  local has_begun = call('HEXISTS', key, 'start:' .. child) == 1
    or call('HEXISTS', PREFIX .. 'places', child) == 1
  if has_begun then return 'begun' end
end
local is_of_keeper = begins_us ~= ''
local fields, continues, is_any_announced = call('HGETALL', key), false, false
for i = 1, #fields, 2 do
  local field, value = fields[i], fields[i + 1]
  local other = string.match(field, '^start:(.+)$')
  if other then
    local ends, other_number = start_of(value)
    if is_of_keeper then
      continues = continues or (other == place and other_number == number)
    else
      continues = continues or other == place or other == instead_of
    end
    if other == instead_of then
      withdraw_start(key, other, stopped ~= '1')
    elseif ends <= now then
      call('HDEL', key, field)
    end
    is_any_announced = is_any_announced or ends > now
  end
end
local is_quiet = now - tonumber(call('HGET', key, 'tried_us') or '0') > FORGET_TRIES_US
local is_new_keeper = is_of_keeper and instead_of == ''
if not is_any_announced and (is_quiet or is_new_keeper) then call('HDEL', key, 'tries') end
if not continues then call('HINCRBY', key, 'tries', 1) end
if is_of_keeper then call('HSET', key, 'next_us', int(now + tonumber(begins_us))) end
if workers ~= '' then call('HSET', key, 'workers', workers) end
local start = int(now + tonumber(lease_us)) .. ' ' .. number .. ' ' .. loaded
call('HSET', key, 'start:' .. place, start, 'tried_us', int(now))
return 'ok'
