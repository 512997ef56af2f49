-- register: lists a new incarnation with its lease, makes its inbox and its role's stream, and forgets
-- the role's losses and failed starts. A worker whose versions are not those of
-- the workers there are is refused, and the reason kept for an hour. It stands by (answer "standby") where its role has workers
-- enough that take tasks, and not yet enough that stand by. Workers of one `stage`, where they name it, hand each other what they
-- computed, and must compute alike too. One whose lease has lapsed counts for neither: it may be long dead.
-- Workers (not gateways) that could not read each other's tensors, or that do not share a secret, are refused ("mismatch") likewise.
-- ARGV: worker, role ("" for a gateway), lease us, event, workers of the role that are to take tasks and to stand by, then
-- field/value pairs of its hash
local w, role, lease, ev, replicas, standby = unpack(ARGV)
if call('ZSCORE', P .. 'workers', w) then return 'exists' end
local given = {}
for i = 7, #ARGV, 2 do given[ARGV[i]] = ARGV[i + 1] end
local function refuse(kind, why, remedy)
  call('HSET', P .. 'refused', w, int(now_us()) .. ' ' .. why)
  call('EXPIRE', P .. 'refused', 3600)
  local process, stage = labels_of(role)
  log_line('warning', process, w, stage, '', (role == '' and 'gateway ' or 'worker ') .. w .. ' is refused: ' .. why .. '; ' .. remedy)
  return {kind, kind == 'skew' and why or why .. '; ' .. remedy}
end
local function reach_in_words(reach, host)
  if reach == 'network' then return 'workers of other hosts' end
  return 'only workers of its own host, user and container (' .. (host or '') .. ')'
end
-- The difference between the peer requirements of two workers, and the remedy; nil if they agree.
local function mismatch(other, theirs)
  if (given.key_id or '') ~= (theirs.key_id or '') then
    local which = not given.key_id and 'it has no fleet secret, ' .. other .. ' has one'
      or not theirs.key_id and 'it has a fleet secret, ' .. other .. ' has none' or 'its fleet secret is not that of ' .. other
    return which, 'set security.fleet_secret to a file of the same content for every worker'
  end
  if not given.reach or not theirs.reach or (given.reach == theirs.reach and given.place == theirs.place) then return nil end
  return 'its tensors can be read by ' .. reach_in_words(given.reach, given.host) .. ', those of ' .. other .. ' by ' ..
    reach_in_words(theirs.reach, theirs.host), 'set transfer.interface for every worker of a fleet on several hosts'
end
local at_work, standing_by = 0, 0
for _, other in ipairs(call('ZRANGEBYSCORE', P .. 'workers', int(now_us()), '+inf')) do
  local same = {'protocol', 'package', 'checkpoint'}
  if given.stage and call('HGET', P .. 'worker:' .. other, 'stage') == given.stage then
    same = {'protocol', 'package', 'checkpoint', 'dtype', 'page_size_tokens'}
  end
  for _, field in ipairs(same) do
    local theirs = call('HGET', P .. 'worker:' .. other, field) or ''
    if given[field] and theirs ~= '' and theirs ~= given[field] then
      local why = 'its ' .. field .. ' is ' .. given[field] .. ', that of ' .. other .. ' is ' .. theirs
      return refuse('skew', why, 'give all processes of the fleet the same version, checkpoint and settings')
    end
  end
  local is = call('HMGET', P .. 'worker:' .. other, 'role', 'standby', 'draining', 'key_id', 'reach', 'place', 'host')
  if role ~= '' and is[1] and is[1] ~= '' then
    local why, remedy = mismatch(other, {key_id = is[4], reach = is[5], place = is[6], host = is[7]})
    if why then return refuse('mismatch', why, remedy) end
  end
  if is[1] == role and is[2] == '1' then standing_by = standing_by + 1
  elseif is[1] == role and is[3] ~= '1' then at_work = at_work + 1 end
end
local stands_by = at_work >= tonumber(replicas) and standing_by < tonumber(standby)
call('ZADD', P .. 'workers', int(now_us() + tonumber(lease)), w)
for i = 7, #ARGV, 2 do call('HSET', P .. 'worker:' .. w, ARGV[i], ARGV[i + 1]) end
call('HSET', P .. 'worker:' .. w, 'role', role, 'started_us', int(now_us()), 'standby', stands_by and '1' or '')
redis.pcall('XGROUP', 'CREATE', P .. 'inbox:' .. w, 'workers', '0', 'MKSTREAM')
if role ~= '' then
  redis.pcall('XGROUP', 'CREATE', P .. 'role:' .. role, 'workers', '0', 'MKSTREAM')
  call('HDEL', availability_key(role), 'lost_us', 'left_us', 'tries', 'next_us')
end
event(ev)
return stands_by and 'standby' or 'ok'
