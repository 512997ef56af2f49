-- submit: compares the queue bound, and that each of `roles` has or expects a worker; writes the request, its tasks, the client task
-- attached to its gateway, `live`, an event. Refused for its roles, the answer is "no_worker", when to try again (us), and which.
-- ARGV: bound, request, spec, blob, stages, edges, outputs, gateway, event, session, what people look for it by: kind, model, brief,
-- roles, grace us
-- A refusal for the queue bound is a line of the log, but not while there was one in the last seconds: a flood of requests must not fill
-- the log. One for its roles is logged by the gateway, which may submit again.
-- `brief`: those of its edges that are kept for less long than the others.
local REFUSING_S = 10
local bound, r, spec, blob, stages, edges, outputs, gateway = unpack(ARGV)
local rk = P .. 'req:' .. r
if call('EXISTS', rk) == 1 then return {'exists'} end
if not call('ZSCORE', P .. 'workers', gateway) then return {'stale'} end
if ARGV[14] ~= '' then
  local roles, missing, retry_us = split(ARGV[14]), {}, 0
  for i, of in ipairs(availability(roles, tonumber(ARGV[15]))) do
    if not of.admits then
      missing[#missing + 1] = roles[i]
      retry_us = math.max(retry_us, of.retry_us)
    end
  end
  if #missing > 0 then return {'no_worker', int(retry_us), unpack(missing)} end
end
local live = call('SCARD', P .. 'live')
if live >= tonumber(bound) then
  if call('SET', P .. 'refusing', r, 'NX', 'EX', REFUSING_S) then
    log_line('warning', 'web', gateway, '', r, 'request ' .. r .. ' is refused: ' .. live .. ' requests are live, and ' ..
      'limits.max_requests allows ' .. bound .. '; more such refusals within ' .. REFUSING_S .. ' s are not logged')
  end
  return {'full', live}
end
call('HSET', rk, 'spec', spec, 'created_us', int(now_us()), 'stages', stages .. ',client', 'edges', edges, 'outputs', outputs,
  'kind', ARGV[11], 'model', ARGV[12], 'brief', ARGV[13])
restate(r, 'submitted')
call('ZADD', P .. 'index:all', 0, r)
if ARGV[10] ~= '' then call('HSET', rk, 'session', ARGV[10]) end
if blob ~= '' then call('SET', rk .. ':blob', blob) end
for _, s in ipairs(split(stages)) do call('HSET', task_key(r, s), 'state', 'pending', 'epoch', '0') end
local epoch = raise(task_key(r, 'client'))
call('HSET', task_key(r, 'client'), 'state', 'running', 'owner', gateway, 'holder', gateway)
call('SADD', tasks_of(gateway), r .. '|client')
call('SADD', P .. 'live', r)
mark(r, 'submitted', '', '', gateway)
count('submitted')
event(ARGV[9])
return {'ok', epoch}
