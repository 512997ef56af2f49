-- share_workers: a `fleet up` renews its lease as a supervisor of workers, and takes its share of
-- the workers that are wanted of each role. A role for which no number was ordered has the workers
-- of the configuration: the share is what the supervisor runs. Otherwise the supervisor with the
-- smallest share that can run more workers takes one more, and the one with the largest share
-- gives one back, until the shares add up to the number; among equals, the first to call. A lapsed
-- supervisor has no share. The first supervisor of a fleet begins with the configuration: it
-- deletes all ordered numbers. Compares the lease, and writes the supervisor's shares.
-- Answers for each role the ordered number ("" none) and this supervisor's share.
-- ARGV: supervisor (host:pid), lease_us ("0": it ends), then repeated 3: role, num_workers (that
-- it runs by its configuration, its share before an order), num_possible (that it can run)
local supervisor, lease_us = unpack(ARGV, 1, 2)
pass_when_full()
local supervisors, now = PREFIX .. 'supervisors', now_us()
local function shares_key(each) return PREFIX .. 'supervisor:' .. each end
call('ZREMRANGEBYSCORE', supervisors, '-inf', int(now))
if lease_us == '0' then
  call('ZREM', supervisors, supervisor)
  call('DEL', shares_key(supervisor))
  return {}
end
if call('ZCARD', supervisors) == 0 then call('DEL', PREFIX .. 'wanted') end
if not call('ZSCORE', supervisors, supervisor) then call('DEL', shares_key(supervisor)) end
call('ZADD', supervisors, int(now + tonumber(lease_us)), supervisor)
call('PEXPIRE', supervisors, int(tonumber(lease_us) / 1000))
-- Return a supervisor's share of a role, and how many of its workers it can run.
local function share_of(each, role)
  local share, possible = string.match(call('HGET', shares_key(each), role) or '', '^(%d+) (%d+)$')
  return tonumber(share), tonumber(possible)
end
local function settle(role, wanted, share, possible)
  local total, least, most = share, nil, 0
  for _, other in ipairs(call('ZRANGE', supervisors, 0, -1)) do
    local other_share, other_possible = share_of(other, role)
    if other ~= supervisor and other_share then
      total, most = total + other_share, math.max(most, other_share)
      if other_share < other_possible then least = math.min(least or other_share, other_share) end
    end
  end
  while total < wanted and share < possible and share <= (least or share) do
    share, total = share + 1, total + 1
  end
  while total > wanted and share > 0 and share >= most do
    share, total = share - 1, total - 1
  end
  return share
end
local answers = {}
for i = 3, #ARGV, 3 do
  local role, num_workers, num_possible = unpack(ARGV, i, i + 2)
  local possible, wanted = tonumber(num_possible), call('HGET', PREFIX .. 'wanted', role)
  local share = math.min(share_of(supervisor, role) or tonumber(num_workers), possible)
  if wanted then share = settle(role, tonumber(wanted), share, possible) end
  call('HSET', shares_key(supervisor), role, int(share) .. ' ' .. int(possible))
  answers[#answers + 1] = wanted or ''
  answers[#answers + 1] = int(share)
end
call('PEXPIRE', shares_key(supervisor), int(tonumber(lease_us) / 1000))
return answers
