-- register: lists a new process with its lease and the lease's duration, creates its inbox and its
-- role's streams, and clears the role's losses and failed starts. Writes the indexes of workers: by
-- role and status, by compared settings, by place. Refused, with the reason kept for an hour: a
-- worker whose versions differ from the listed workers' ("skew"), and one that could not exchange
-- tensors with them or does not share their secret ("mismatch"). Workers of one `stage`, where they
-- name it, hand tasks over to each other and must therefore compute alike too. A lapsed worker is
-- ignored: it may be long dead. It stands by (answer "standby") where its role has `replicas`
-- workers that accept tasks, or as many as were ordered, and fewer than `standby` that stand by.
-- ARGV: worker, role ("" for a gateway), lease_us, event, replicas, standby, then repeated 2:
-- field, value (of its hash)
local worker, role, lease_us, event, replicas, standby = unpack(ARGV, 1, 6)
pass_when_full()
if call('ZSCORE', PREFIX .. 'workers', worker) then return 'exists' end
local own = {}
for i = 7, #ARGV, 2 do
  local field, value = unpack(ARGV, i, i + 1)
  own[field] = value
end
local function refuse(kind, why, remedy)
  local refused = PREFIX .. 'refused'
  call('ZADD', refused, int(now_us()), worker .. ' ' .. why)
  call('ZREMRANGEBYSCORE', refused, '-inf', int(now_us() - REFUSED_KEPT_S * 1000000))
  call('ZREMRANGEBYRANK', refused, 0, -1 - MAX_REFUSED)
  call('EXPIRE', refused, REFUSED_KEPT_S)
  local process, stage = labels_of(role)
  log_fact('warning', process, worker, stage, '',
    (role == '' and 'gateway ' or 'worker ') .. worker .. ' is refused: ' .. why .. '; ' .. remedy)
  return {kind, kind == 'skew' and why or why .. '; ' .. remedy}
end
local function readers_of(reach, host)
  if reach == 'network' then return 'workers of other hosts' end
  return 'only workers of its own host, user and container (' .. (host or '') .. ')'
end
local function difference_of_secrets(other, peer)
  if not own.key_id then return 'it has no fleet secret, ' .. other .. ' has one' end
  if not peer.key_id then return 'it has a fleet secret, ' .. other .. ' has none' end
  return 'its fleet secret is not that of ' .. other
end
-- The difference between the peer requirements of two workers, and the remedy; nil if they agree.
local function mismatch(other, peer)
  if (own.key_id or '') ~= (peer.key_id or '') then
    return difference_of_secrets(other, peer),
      'set security.fleet_secret to a file of the same content for every worker'
  end
  if not own.reach or not peer.reach then return nil end
  if own.reach == peer.reach and own.place == peer.place then return nil end
  return 'its tensors can be read by ' .. readers_of(own.reach, own.host) .. ', those of ' ..
    other .. ' by ' .. readers_of(peer.reach, peer.host),
    'set transfer.interface for every worker of a fleet on several hosts'
end
-- The listed workers with the same compared settings are a group. All workers of a group give the
-- same answer, so one is compared.
local ALWAYS = {'protocol', 'package', 'checkpoint', 'kernels'}
local WITHIN_STAGE = {
  'protocol', 'package', 'checkpoint', 'kernels', 'gpu_kernels', 'engine', 'dtype', 'numerics',
  'page_size_tokens', 'tensor_parallel_size', 'quantization', 'device_kind',
}
local function own_group()
  local values = {role == '' and 'gateway' or 'worker'}
  for _, fields in ipairs({WITHIN_STAGE, {'stage', 'checkpoint_of', 'key_id', 'reach', 'place'}}) do
    for _, field in ipairs(fields) do
      values[#values + 1] = own[field] or ''
    end
  end
  return cjson.encode(values)
end
local now = now_us()
local function compare(other)
  local other_key = PREFIX .. 'worker:' .. other
  local other_role, stage, key_id, reach, place, host, checkpoint_of = unpack(call(
    'HMGET', other_key, 'role', 'stage', 'key_id', 'reach', 'place', 'host', 'checkpoint_of'))
  local is_of_stage = own.stage and stage == own.stage
  for _, field in ipairs(is_of_stage and WITHIN_STAGE or ALWAYS) do
    local value = call('HGET', other_key, field) or ''
    -- The checkpoints of two stages that have one each are not alike.
    if field == 'checkpoint' and (checkpoint_of or '') ~= (own.checkpoint_of or '') then
      value = ''
    end
    if own[field] and value ~= '' and value ~= own[field] then
      local why = 'its ' .. field .. ' is ' .. own[field] .. ', that of ' .. other .. ' is ' ..
        value
      local remedy = 'give all processes of the fleet the same version, checkpoint and settings'
      return refuse('skew', why, remedy)
    end
  end
  if role ~= '' and other_role and other_role ~= '' then
    local peer = {key_id = key_id, reach = reach, place = place, host = host}
    local why, remedy = mismatch(other, peer)
    if why then return refuse('mismatch', why, remedy) end
  end
end
for _, group in ipairs(call('SMEMBERS', PREFIX .. 'settings_groups')) do
  local key = settings_group_key(group)
  local other = call('ZREVRANGEBYSCORE', key, '+inf', int(now), 'LIMIT', 0, 1)[1]
  local refusal = other and compare(other)
  if refusal then return refusal end
end
local function num_live(status)
  return call('ZCOUNT', role_workers_key(role, status), int(now), '+inf')
end
local wanted = tonumber(call('HGET', PREFIX .. 'wanted', role) or replicas)
local stands_by = role ~= '' and num_live('accepting') >= wanted
  and num_live('standby') < tonumber(standby)
local worker_key = PREFIX .. 'worker:' .. worker
call('ZADD', PREFIX .. 'workers', int(now + tonumber(lease_us)), worker)
for i = 7, #ARGV, 2 do
  local field, value = unpack(ARGV, i, i + 1)
  call('HSET', worker_key, field, value)
end
call('HSET', worker_key, 'role', role, 'lease_us', lease_us, 'started_us', int(now),
  'standby', stands_by and '1' or '', 'settings_group', own_group())
index_worker(worker)
local place = place_of(worker)
if place then call('HSET', PREFIX .. 'places', place, worker) end
redis.pcall('XGROUP', 'CREATE', PREFIX .. 'inbox:' .. worker, 'workers.idle', '0', 'MKSTREAM')
if role ~= '' then
  for _, group in ipairs({'workers', 'workers.idle'}) do
    for _, first in ipairs({true, false}) do
      redis.pcall('XGROUP', 'CREATE', role_key(role, first), group, '0', 'MKSTREAM')
    end
  end
  call('HDEL', availability_key(role), 'lost_us', 'left_us', 'tries', 'next_us')
end
write_journal('joined', 'worker', worker, 'role', role, 'detail', stands_by and 'standby' or '')
publish_event(event)
return stands_by and 'standby' or 'ok'
