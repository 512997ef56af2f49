-- register: lists a new incarnation with its lease, makes its inbox and its role's stream. A worker whose versions are not those of
-- the workers there are is refused, and the reason kept for an hour.
-- ARGV: worker, role ("" for a gateway), lease us, event, then field/value pairs of its hash
local w, role, lease, ev = unpack(ARGV)
if call('ZSCORE', P .. 'workers', w) then return 'exists' end
local given = {}
for i = 5, #ARGV, 2 do given[ARGV[i]] = ARGV[i + 1] end
for _, other in ipairs(call('ZRANGE', P .. 'workers', 0, -1)) do
  for _, field in ipairs({'protocol', 'package', 'checkpoint'}) do
    local theirs = call('HGET', P .. 'worker:' .. other, field) or ''
    if given[field] and theirs ~= '' and theirs ~= given[field] then
      local why = 'its ' .. field .. ' is ' .. given[field] .. ', that of ' .. other .. ' is ' .. theirs
      call('HSET', P .. 'refused', w, int(now_us()) .. ' ' .. why)
      call('EXPIRE', P .. 'refused', 3600)
      return {'skew', why}
    end
  end
end
call('ZADD', P .. 'workers', int(now_us() + tonumber(lease)), w)
for i = 5, #ARGV, 2 do call('HSET', P .. 'worker:' .. w, ARGV[i], ARGV[i + 1]) end
call('HSET', P .. 'worker:' .. w, 'role', role, 'started_us', int(now_us()))
redis.pcall('XGROUP', 'CREATE', P .. 'inbox:' .. w, 'workers', '0', 'MKSTREAM')
if role ~= '' then redis.pcall('XGROUP', 'CREATE', P .. 'role:' .. role, 'workers', '0', 'MKSTREAM') end
event(ev)
return 'ok'
