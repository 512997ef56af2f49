-- Ends of tasks and requests, and the index of requests.

local MAX_INDEX = 20000
-- Set the request's state in its hash and in the index, which only orders.
local function set_state(request, state)
  local request_key = PREFIX .. 'req:' .. request
  local before = call('HGET', request_key, 'state')
  if before == state then return end
  local is_allowed = request_moves()[before or ''][state]
  assert(is_allowed, 'a ' .. (before or 'new') .. ' request cannot be ' .. state)
  if before then call('ZREM', PREFIX .. 'index:' .. before, request) end
  call('HSET', request_key, 'state', state)
  call('ZADD', PREFIX .. 'index:' .. state, 0, request)
end
-- Remove expired requests from the index, and the oldest ended ones beyond its bound.
local function prune_index()
  local expires = PREFIX .. 'index:expires'
  local due = call('ZRANGEBYSCORE', expires, '-inf', int(now_us()), 'LIMIT', 0, 20)
  if #due == 0 and call('ZCARD', PREFIX .. 'index:all') > MAX_INDEX then
    due = call('ZRANGE', expires, 0, 19)
  end
  for _, request in ipairs(due) do
    for _, index in ipairs({'expires', 'all', 'finished', 'failed', 'aborted'}) do
      call('ZREM', PREFIX .. 'index:' .. index, request)
    end
  end
end
-- Close a request: end every right, notify every holder, give every key its time to live, as
-- submitted. Answers "ended" if it has ended.
local function close(request, state, code, message, param)
  local request_key = PREFIX .. 'req:' .. request
  if call('SREM', PREFIX .. 'live', request) == 0 then return 'ended' end
  set_state(request, state)
  local stages, edges, audio_edges, retention_s, audio_retention_s, client, key = unpack(
    call('HMGET', request_key,
      'stages', 'edges', 'brief', 'retention_s', 'audio_retention_s', 'share', 'key'))
  if client then count_live(client, -1) end
  if key and key ~= '' then
    count_live_of_key(key, -1)
    count_audio_of(request, key, stages, audio_edges)
  end
  call('HSET', request_key,
    'code', code, 'message', message, 'param', param, 'ended_us', int(now_us()))
  call('EXPIRE', request_key, retention_s)
  call('EXPIRE', request_key .. ':blob', audio_retention_s)
  trace(request, 'ended', '', '', '', state .. (message ~= '' and ': ' .. message or ''))
  call('EXPIRE', request_key .. ':trace', retention_s)
  local expires_us = now_us() + tonumber(retention_s) * 1000000
  call('ZADD', PREFIX .. 'index:expires', int(expires_us), request)
  prune_index()
  count('ended:' .. state)
  for _, stage in ipairs(split(stages)) do
    local task = task_key(request, stage)
    local granted = call('HGET', task, 'state') == 'granted'
    local holder = call('HGET', task, 'holder')
    remove_owner(task, request, stage)
    raise_epoch(task)
    if granted then withdraw(task, request, stage) end
    move(task, request, stage, 'closed')
    if holder and holder ~= '' then
      notify(holder, 'k', 'x', 'r', request, 's', state, 'c', code, 'm', message, 'p', param)
    end
    call('EXPIRE', task, retention_s)
    call('DEL', kv_key(request, stage))
  end
  for _, edge in ipairs(split(edges)) do
    call('EXPIRE', edge_key(request, edge), retention_s)
    call('DEL', location_key(request, edge))
  end
  for _, edge in ipairs(split(audio_edges)) do
    call('EXPIRE', edge_key(request, edge), audio_retention_s)
  end
  if audio_edges ~= '' or call('EXISTS', request_key .. ':blob') == 1 then
    local audio_expires_us = now_us() + tonumber(audio_retention_s) * 1000000
    local entry = request .. '|' .. audio_edges
    call('ZADD', PREFIX .. 'retained_audio', int(audio_expires_us), entry)
  end
  publish_event(cjson.encode(
    {type = 'RequestEnded', request = request, state = state, reason = message}))
  return 'ok'
end
-- Close a request as failed, because of a task of `stage` and its `worker` ("" if none has it).
local function close_failed(request, stage, worker, code, message, param)
  if close(request, 'failed', code, message, param) == 'ended' then return end
  local role = call('HGET', task_key(request, stage), 'role') or ''
  write_journal('failed', 'worker', worker, 'role', role, 'request', request, 'stage', stage,
    'code', code, 'detail', string.sub(message, 1, MAX_DETAIL_BYTES))
end
-- Close the request as finished if every task has finished, the client's too: the answer was
-- delivered. To be called where a task finishes. States are compared, and not a count of open
-- tasks: a finished task may run again to recompute its tensors, and a repeated last chunk finishes
-- it twice.
local function close_if_complete(request)
  if call('HGET', task_key(request, 'client'), 'state') ~= 'finished' then return end
  for _, stage in ipairs(split(call('HGET', PREFIX .. 'req:' .. request, 'stages'))) do
    if call('HGET', task_key(request, stage), 'state') ~= 'finished' then return end
  end
  close(request, 'finished', '', '', '')
end
-- Finish a task with its last output; one that has ended stays as it is.
local function finish_task(task, request, stage, epoch, state, now)
  if not next_state('finished', state) then return end
  move(task, request, stage, 'finished', 'finished_us', now)
  local owner = remove_owner(task, request, stage)
  if state == 'running' then
    trace(request, 'finished', stage, epoch, owner)
    count_us('took:' .. stage, now - (call('HGET', task, 'claimed_us') or now))
  end
  publish_event(cjson.encode({type = 'TaskFinished', request = request, stage = stage, epoch = 0})
    :gsub('"epoch":0', '"epoch":' .. epoch))
  close_if_complete(request)
end
