-- register: lists a new process with its lease and the lease's duration, creates its inbox and its role's streams, and clears the role's
-- losses and failed starts. Writes the indexes of workers: by role and status, by compared settings, by place. Refused, with the
-- reason kept for an hour: a worker whose versions differ from the listed workers' ("skew"), and one
-- that could not exchange tensors with them or does not share their secret ("mismatch"). Workers of one `stage`, where they name it,
-- hand tasks over to each other and must therefore compute alike too. A lapsed worker is ignored: it may be long dead.
-- It stands by (answer "standby") where its role has `replicas` workers that accept tasks, and fewer than `standby` that stand by.
-- ARGV: worker, role ("" for a gateway), lease us, event, replicas, standby, then field/value pairs of its hash
pass_when_full()
local w, role, lease, ev, replicas, standby = unpack(ARGV)
if call('ZSCORE', P .. 'workers', w) then return 'exists' end
local own = {}
for i = 7, #ARGV, 2 do own[ARGV[i]] = ARGV[i + 1] end
local function refuse(kind, why, remedy)
  local refused = P .. 'refused'
  call('ZADD', refused, int(now_us()), w .. ' ' .. why)
  call('ZREMRANGEBYSCORE', refused, '-inf', int(now_us() - REFUSED_KEPT_S * 1000000))
  call('ZREMRANGEBYRANK', refused, 0, -1 - MAX_REFUSED)
  call('EXPIRE', refused, REFUSED_KEPT_S)
  local process, stage = labels_of(role)
  log_fact('warning', process, w, stage, '', (role == '' and 'gateway ' or 'worker ') .. w .. ' is refused: ' .. why .. '; ' .. remedy)
  return {kind, kind == 'skew' and why or why .. '; ' .. remedy}
end
local function readers_of(reach, host)
  if reach == 'network' then return 'workers of other hosts' end
  return 'only workers of its own host, user and container (' .. (host or '') .. ')'
end
-- The difference between the peer requirements of two workers, and the remedy; nil if they agree.
local function mismatch(other, peer)
  if (own.key_id or '') ~= (peer.key_id or '') then
    local which = not own.key_id and 'it has no fleet secret, ' .. other .. ' has one'
      or not peer.key_id and 'it has a fleet secret, ' .. other .. ' has none' or 'its fleet secret is not that of ' .. other
    return which, 'set security.fleet_secret to a file of the same content for every worker'
  end
  if not own.reach or not peer.reach or (own.reach == peer.reach and own.place == peer.place) then return nil end
  return 'its tensors can be read by ' .. readers_of(own.reach, own.host) .. ', those of ' .. other .. ' by ' ..
    readers_of(peer.reach, peer.host), 'set transfer.interface for every worker of a fleet on several hosts'
end
-- The listed workers with the same compared settings are a group. All workers of a group give the same answer, so one is compared.
local ALWAYS = {'protocol', 'package', 'checkpoint', 'kernels'}
local WITHIN_STAGE = {'protocol', 'package', 'checkpoint', 'kernels', 'engine', 'dtype', 'numerics', 'page_size_tokens',
  'tensor_parallel_size', 'quantization', 'device_kind'}
local function own_group()
  local values = {role == '' and 'gateway' or 'worker'}
  for _, fields in ipairs({WITHIN_STAGE, {'stage', 'key_id', 'reach', 'place'}}) do
    for _, field in ipairs(fields) do values[#values + 1] = own[field] or '' end
  end
  return cjson.encode(values)
end
local now = now_us()
local function compare(other)
  local is = call('HMGET', P .. 'worker:' .. other, 'role', 'stage', 'key_id', 'reach', 'place', 'host')
  for _, field in ipairs(own.stage and is[2] == own.stage and WITHIN_STAGE or ALWAYS) do
    local value = call('HGET', P .. 'worker:' .. other, field) or ''
    if own[field] and value ~= '' and value ~= own[field] then
      local why = 'its ' .. field .. ' is ' .. own[field] .. ', that of ' .. other .. ' is ' .. value
      return refuse('skew', why, 'give all processes of the fleet the same version, checkpoint and settings')
    end
  end
  if role ~= '' and is[1] and is[1] ~= '' then
    local why, remedy = mismatch(other, {key_id = is[3], reach = is[4], place = is[5], host = is[6]})
    if why then return refuse('mismatch', why, remedy) end
  end
end
for _, group in ipairs(call('SMEMBERS', P .. 'settings_groups')) do
  local other = call('ZREVRANGEBYSCORE', settings_group_key(group), '+inf', int(now), 'LIMIT', 0, 1)[1]
  local refusal = other and compare(other)
  if refusal then return refusal end
end
local function num_live(status) return call('ZCOUNT', role_workers_key(role, status), int(now), '+inf') end
local stands_by = role ~= '' and num_live('accepting') >= tonumber(replicas) and num_live('standby') < tonumber(standby)
call('ZADD', P .. 'workers', int(now + tonumber(lease)), w)
for i = 7, #ARGV, 2 do call('HSET', P .. 'worker:' .. w, ARGV[i], ARGV[i + 1]) end
call('HSET', P .. 'worker:' .. w, 'role', role, 'lease_us', lease, 'started_us', int(now), 'standby', stands_by and '1' or '',
  'settings_group', own_group())
index_worker(w)
if place_of(w) then call('HSET', P .. 'places', place_of(w), w) end
redis.pcall('XGROUP', 'CREATE', P .. 'inbox:' .. w, 'workers.idle', '0', 'MKSTREAM')
if role ~= '' then
  for _, group in ipairs({'workers', 'workers.idle'}) do
    for _, first in ipairs({true, false}) do redis.pcall('XGROUP', 'CREATE', role_key(role, first), group, '0', 'MKSTREAM') end
  end
  call('HDEL', availability_key(role), 'lost_us', 'left_us', 'tries', 'next_us')
end
event(ev)
return stands_by and 'standby' or 'ok'
