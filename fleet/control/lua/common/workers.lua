-- The indexes of workers, and which roles expect one.

local MAX_FAILED_STARTS, USUAL_START_US, MAX_START_US = 3, 5000000, 120000000
local STATUSES = {'accepting', 'leaving', 'ordered_off', 'standby'}
local function role_workers_key(role, status)
  return PREFIX .. 'role_workers:' .. role .. ':' .. status
end
local function settings_group_key(group) return PREFIX .. 'settings_group:' .. group end
-- Return the status under which a worker is indexed: "leaving" drains by its own decision,
-- "ordered_off" by an operator's order.
local function status_of(standby, draining, ordered_off)
  if standby == '1' then return 'standby' end
  if ordered_off == '1' then return 'ordered_off' end
  return draining == '1' and 'leaving' or 'accepting'
end
-- Set a worker's place in the indexes of listed workers: with its lease deadline in the set of its
-- role and status and in the set of its settings, in none once it is unlisted. Every script that
-- lists it or changes these fields of its hash calls this after.
local function index_worker(worker)
  local role, standby, draining, ordered_off, group = unpack(
    call('HMGET', PREFIX .. 'worker:' .. worker,
      'role', 'standby', 'draining', 'ordered_off', 'settings_group'))
  local deadline = call('ZSCORE', PREFIX .. 'workers', worker)
  if role and role ~= '' then
    local present = deadline and status_of(standby, draining, ordered_off)
    for _, status in ipairs(STATUSES) do
      if status == present then
        call('ZADD', role_workers_key(role, status), deadline, worker)
      else
        call('ZREM', role_workers_key(role, status), worker)
      end
    end
  end
  if not group then return end
  if deadline then
    call('ZADD', settings_group_key(group), deadline, worker)
    call('SADD', PREFIX .. 'settings_groups', group)
  else
    call('ZREM', settings_group_key(group), worker)
    if call('EXISTS', settings_group_key(group)) == 0 then
      call('SREM', PREFIX .. 'settings_groups', group)
    end
  end
end
-- Return the place (host:pid) in a worker's id; nil for an id without one.
local function place_of(worker) return string.match(worker, '@([^:]*:[^:]*):') end
-- Let a standby worker accept tasks.
local function end_standby(worker)
  call('HSET', PREFIX .. 'worker:' .. worker, 'standby', '')
  index_worker(worker)
  notify(worker, 'k', 'p')
end
-- Let a standby worker of the role accept tasks, if there is one, and if not as many as were
-- ordered do already: the one with the longest lease is surely alive.
local function promote(role)
  local wanted = call('HGET', PREFIX .. 'wanted', role)
  local serving = call('ZCOUNT', role_workers_key(role, 'accepting'), int(now_us()), '+inf')
  if wanted and serving >= tonumber(wanted) then return end
  local standby = role_workers_key(role, 'standby')
  local worker = call('ZREVRANGEBYSCORE', standby, '+inf', int(now_us()), 'LIMIT', 0, 1)[1]
  if worker then end_standby(worker) end
end
-- Return the number of the role's live workers that accept tasks, for the journal; "" for gateways.
-- A standby worker counts where none does: the running script lets it accept tasks.
local function num_serving(role)
  if not role or role == '' then return '' end
  local function num_live(status)
    return call('ZCOUNT', role_workers_key(role, status), int(now_us()), '+inf')
  end
  return math.max(num_live('accepting'), math.min(num_live('standby'), 1))
end
local function availability_key(role) return PREFIX .. 'availability:' .. role end
-- Return until when an announced start counts (us), the number of a keeper's start ("" for a
-- process), and the percentage of its weights that is loaded (nil unknown).
local function start_of(value)
  local ends, number, loaded = string.match(value, '^(%d+) ?(%d*) ?(%d*)$')
  return tonumber(ends), number, tonumber(loaded)
end
-- Withdraw the announced start at `place`. A start that did not fail is no try.
local function withdraw_start(key, place, failed)
  if call('HDEL', key, 'start:' .. place) == 0 then return false end
  if not failed and tonumber(call('HGET', key, 'tries') or '0') > 0 then
    call('HINCRBY', key, 'tries', -1)
  end
  return true
end
-- Return the latest lease deadline (us) of a role's workers of these statuses; 0 without one.
local function latest_deadline(role, ...)
  local latest = 0
  for _, status in ipairs({...}) do
    local key = role_workers_key(role, status)
    local _, deadline = unpack(call('ZREVRANGE', key, 0, 0, 'WITHSCORES'))
    latest = math.max(latest, tonumber(deadline or '0'))
  end
  return latest
end
-- Return the announced starts and losses of a role, and until when they alone let it admit
-- requests. Announced starts are ignored once too many have failed in a row, and times far in the
-- future are (Redis's clock may have been set back).
local function announced(role, grace_us, now)
  local found = {}
  local starting, starting_until, most_loaded = 0, 0, nil
  local fields = call('HGETALL', availability_key(role))
  for i = 1, #fields, 2 do
    local field, value = fields[i], fields[i + 1]
    if string.sub(field, 1, 6) ~= 'start:' then
      found[field] = tonumber(value)
    else
      local ends, _, loaded = start_of(value)
      if ends > now and ends <= now + MAX_START_US then
        starting = starting + 1
        starting_until = math.max(starting_until, ends)
        if loaded then most_loaded = math.max(most_loaded or 0, loaded) end
      end
    end
  end
  if (found.tries or 0) - starting >= MAX_FAILED_STARTS * (found.workers or 1) then
    starting, starting_until, most_loaded = 0, 0, nil
  end
  for _, name in ipairs({'lost_us', 'left_us'}) do
    if (found[name] or 0) > now + grace_us then found[name] = nil end
  end
  found.loaded = most_loaded
  found.starting = starting
  found.admits_until = math.max((found.lost_us or 0) + grace_us, starting_until)
  return found
end
-- The one rule by which roles expect a worker, for each of `roles` in order. New requests are
-- admitted (`admits`) while the role has a worker that serves, had its last one less than
-- `grace_us` ago, or has one starting. A worker that was ordered to drain or stop does not count;
-- one that leaves by its own decision does, since it is started again. Requests in flight are kept
-- (`keeps`) on the same terms, and for `grace_us` after a worker was ordered to drain or stop.
-- `starting` counts the starts, and the most advanced of them has `loaded` per cent of its weights
-- (nil unknown); `retry_us` is the time until a retry, estimated from the duration of the last
-- start.
local function availability(roles, grace_us)
  local now, out = now_us(), {}
  for i, role in ipairs(roles) do
    local found = announced(role, grace_us, now)
    local serving = latest_deadline(role, 'accepting', 'leaving')
    local stopping = latest_deadline(role, 'ordered_off', 'standby')
    local present = math.max(serving, stopping, found.left_us or 0)
    local admits = math.max(serving + grace_us, found.admits_until) > now
    out[i] = {
      admits = admits,
      keeps = admits or present + grace_us > now,
      starting = found.starting,
      loaded = found.loaded,
      retry_us = math.max((found.next_us or 0) - now, 0) + (found.took_us or USUAL_START_US),
    }
  end
  return out
end
