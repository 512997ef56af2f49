-- Whether a request is admitted, and its beginning.

local REFUSING_S = 10
-- Return how many more tasks each of `roles` may be granted now, so that its workers soon claim
-- them: tasks are claimed in the order of their grants, whoever's they are.
local MAX_UNCLAIMED = 16
local function num_claimed_soon(roles, live)
  local soon = {}
  for i, role in ipairs(roles) do
    local new_grants = PREFIX .. 'role:' .. role
    local unclaimed = live >= MAX_UNCLAIMED and call('XLEN', new_grants) or 0
    soon[i] = MAX_UNCLAIMED - unclaimed
  end
  return soon
end
-- Return the answer for a request that is refused, nil if it is admitted: each of `roles` must have
-- or expect a worker, and fewer than `bound` requests be live. A request that `waits` until it is
-- admitted must have its turn too ("turn"), and workers that soon claim its tasks ("soon"). The
-- refusal of another one is logged, at most once in some seconds: a flood of requests must not fill
-- the log. A refusal for a role is logged by the gateway, which may call again.
local function admission_refusal(request, gateway, bound, roles, grace_us, client, waits)
  local wanted, missing, retry_us = roles ~= '' and split(roles) or {}, {}, 0
  for i, found in ipairs(availability(wanted, tonumber(grace_us))) do
    if not found.admits then
      missing[#missing + 1] = wanted[i]
      retry_us = math.max(retry_us, found.retry_us)
    end
  end
  if #missing > 0 then return {'no_worker', int(retry_us), unpack(missing)} end
  local live = call('SCARD', PREFIX .. 'live')
  local free = tonumber(bound) - live - num_kept_free(client, live, bound)
  if waits == 'soon' then free = math.min(free, unpack(num_claimed_soon(wanted, live))) end
  if free > 0 and (waits == '' or has_turn(client, free)) then return nil end
  if waits == '' and call('SET', PREFIX .. 'refusal_logged', request, 'NX', 'EX', REFUSING_S) then
    log_line('warning', 'web', gateway, '', request,
      'request ' .. request .. ' is refused: ' .. live .. ' requests are live, and ' ..
      'limits.max_requests allows ' .. bound .. '; more such refusals within ' .. REFUSING_S ..
      ' s are not logged')
  end
  return {'full', live}
end
-- Write a request with its tasks: the client's, held by `gateway` at the epoch that is written
-- already, and one per stage, each granted to its first role: later stages wait, warm, before there
-- is input. `what` is added to the trace. `written`: spec, blob, stages, edges, outputs, event,
-- session, kind and model (shown in the index of requests), edges of audio (retained for less long
-- than the others), retention s, audio's retention s, first role of each stage, client, key
-- ("" if the request counts towards no key), ms of audio in its prompt, sample rate of its answer.
local function begin_request(request, gateway, what, written)
  local spec, blob, stages, edges, outputs, event, session, kind, model, audio_edges, retention_s,
    audio_retention_s, first_roles, client, key, prompt_ms, rate_hz = unpack(written)
  local request_key, client_task = PREFIX .. 'req:' .. request, task_key(request, 'client')
  call('HSET', request_key, 'spec', spec, 'created_us', int(now_us()),
    'stages', stages .. ',client', 'edges', edges, 'outputs', outputs, 'kind', kind, 'model', model,
    'brief', audio_edges, 'retention_s', retention_s, 'audio_retention_s', audio_retention_s,
    'share', client, 'key', key, 'prompt_ms', prompt_ms, 'rate_hz', rate_hz)
  set_state(request, 'submitted')
  call('ZADD', PREFIX .. 'index:all', 0, request)
  if session ~= '' then call('HSET', request_key, 'session', session) end
  if blob ~= '' then call('SET', request_key .. ':blob', blob) end
  move(client_task, request, 'client', 'attached', 'owner', gateway, 'holder', gateway)
  call('SADD', tasks_of(gateway), request .. '|client')
  call('SADD', PREFIX .. 'live', request)
  count_live(client, 1)
  count_live_of_key(key, 1)
  trace(request, what, '', '', gateway)
  publish_event(event)
  local roles = split(first_roles)
  for i, stage in ipairs(split(stages)) do
    local worker = session ~= '' and caching_worker(request, stage, roles[i]) or nil
    grant_task(task_key(request, stage), request, stage, roles[i], '', worker)
  end
end
