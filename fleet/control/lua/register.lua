-- register: lists a new incarnation with its lease, makes its inbox and its role's stream.
-- ARGV: worker, role ("" for a gateway), lease us, event, then field/value pairs of its hash
local w, role, lease, ev = unpack(ARGV)
if call('ZSCORE', P .. 'workers', w) then return 'exists' end
call('ZADD', P .. 'workers', int(now_us() + tonumber(lease)), w)
for i = 5, #ARGV, 2 do call('HSET', P .. 'worker:' .. w, ARGV[i], ARGV[i + 1]) end
call('HSET', P .. 'worker:' .. w, 'role', role, 'started_us', int(now_us()))
redis.pcall('XGROUP', 'CREATE', P .. 'inbox:' .. w, 'workers', '0', 'MKSTREAM')
if role ~= '' then redis.pcall('XGROUP', 'CREATE', P .. 'role:' .. role, 'workers', '0', 'MKSTREAM') end
event(ev)
return 'ok'
