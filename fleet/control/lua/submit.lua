-- submit: compares the queue bound, and that each of `roles` has or expects a worker; writes the request, `live`, an event and the client
-- task attached to its gateway; grants one task per stage to its first role: later stages wait, warm, before there is input.
-- Refused for its roles, it answers "no_worker", the time until a retry (us), and the roles.
-- `kind` and `model` are shown in the index of requests. `brief`: edges of audio, retained for less long than the others.
-- ARGV: bound, request, spec, blob, stages, edges, outputs, gateway, event, session, kind, model, brief, roles, grace us, retention s,
-- audio's retention s, first role of each stage
local bound, r, spec, blob, stages, edges, outputs, gateway = unpack(ARGV)
local rk = P .. 'req:' .. r
if call('EXISTS', rk) == 1 then return {'exists'} end
if not call('ZSCORE', P .. 'workers', gateway) then return {'stale'} end
local refusal = admission_refusal(r, gateway, bound, ARGV[14], ARGV[15])
if refusal then return refusal end
call('HSET', rk, 'spec', spec, 'created_us', int(now_us()), 'stages', stages .. ',client', 'edges', edges, 'outputs', outputs,
  'kind', ARGV[11], 'model', ARGV[12], 'brief', ARGV[13], 'retention_s', ARGV[16], 'audio_retention_s', ARGV[17])
set_state(r, 'submitted')
call('ZADD', P .. 'index:all', 0, r)
if ARGV[10] ~= '' then call('HSET', rk, 'session', ARGV[10]) end
if blob ~= '' then call('SET', rk .. ':blob', blob) end
local epoch = raise_epoch(task_key(r, 'client'))
move(task_key(r, 'client'), r, 'client', 'attached')
call('HSET', task_key(r, 'client'), 'owner', gateway, 'holder', gateway)
call('SADD', tasks_of(gateway), r .. '|client')
call('SADD', P .. 'live', r)
trace(r, 'submitted', '', '', gateway)
count('submitted')
event(ARGV[9])
local first_roles = split(ARGV[18])
for i, s in ipairs(split(stages)) do
  grant_task(task_key(r, s), r, s, first_roles[i], '', caching_worker(r, s, first_roles[i]))
end
return {'ok', epoch}
