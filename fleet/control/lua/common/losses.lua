-- Lost owners, deaths that count against a task, and suspects of a death.

local MAX_DEAD, MAX_DEAD_BYTES = 1000, 67108864
local FENCE_SLICE = 50
-- Deaths over a task without progress before it runs alone: until then, another task of the batch
-- may be the cause. Beyond that number a death alone condemns the request.
local MAX_DEATHS = 2
-- Return true if the task's owner may have been working on it: on a chunk beyond those consumed
-- when it last reported idle, or, for a task without inputs, on the request itself.
local function had_work(task, request)
  local inputs = split(call('HGET', task, 'inputs'))
  for _, edge in ipairs(inputs) do
    local num_chunks = call('XLEN', edge_key(request, edge))
    if num_chunks > tonumber(call('HGET', task, 'idle_consumed:' .. edge) or '0') then
      return true
    end
  end
  return #inputs == 0
end
-- Return the number of chunks that a task has appended.
local function produced_by(task)
  local produced, fields = 0, call('HGETALL', task)
  for i = 1, #fields, 2 do
    local field, value = fields[i], fields[i + 1]
    if string.sub(field, 1, 9) == 'produced:' then produced = produced + tonumber(value) end
  end
  return produced
end
-- Count a death over a task; return the number of deaths since its last append.
local function count_death(task)
  local produced = int(produced_by(task))
  local counted, produced_before = unpack(call('HMGET', task, 'deaths', 'produced_at_death'))
  local deaths = produced_before == produced and tonumber(counted or '0') + 1 or 1
  call('HSET', task, 'deaths', int(deaths), 'produced_at_death', produced)
  return deaths
end
-- Keep what is needed to submit a request again whose task killed its workers. The oldest letters
-- are removed beyond a number and a size.
local function keep_dead_letter(request, stage, why)
  local request_key, letters_key = PREFIX .. 'req:' .. request, PREFIX .. 'dead_letters'
  local spec = call('HGET', request_key, 'spec')
  local blob = call('GET', request_key .. ':blob') or ''
  local num_bytes = #spec + #blob
  if blob ~= '' then call('SET', PREFIX .. 'dead_letter:' .. request .. ':blob', blob) end
  call('XADD', letters_key, '*', 'r', request, 's', stage, 'why', why, 'spec', spec, 'n', num_bytes)
  local letters = call('XREVRANGE', letters_key, '+', '-')
  local total_bytes = 0
  for number, letter in ipairs(letters) do
    local id, fields = unpack(letter)
    local old_request, old_num_bytes = fields[2], fields[10]  -- names and values in turn
    total_bytes = total_bytes + tonumber(old_num_bytes)
    if number > 1 and (number > MAX_DEAD or total_bytes > MAX_DEAD_BYTES) then
      call('XDEL', letters_key, id)
      call('UNLINK', PREFIX .. 'dead_letter:' .. old_request .. ':blob')
    end
  end
end
-- Fail a request whose task killed several workers, the last one (`worker`) with no other task. The
-- request becomes a dead letter.
local function condemn(request, stage, deaths, worker)
  local why = deaths .. ' workers of stage ' .. stage ..
    ' died over this request, the last one with no other task'
  call('HSET', PREFIX .. 'req:' .. request, 'failed_stage', stage)
  keep_dead_letter(request, stage, why)
  log_fact('error', 'conductor', worker, stage, request,
    'request ' .. request .. ' is a dead letter: ' .. why .. '; the last was ' ..
    (worker ~= '' and worker or 'unknown') .. '; `fleet dead-letters list` shows it')
  close_failed(request, stage, worker, 'worker_lost', why, '')
end
local function evidence_key(worker) return PREFIX .. 'gone:' .. worker .. ':tasks' end
-- Remember that the end of process `worker`, if it is observed, counts against this task: the
-- process computed for it, and is silent.
local function note_evidence(task, request, stage, worker)
  local progress = int(produced_by(task)) .. '|' .. (call('HGET', task, 'alone') or '')
  call('HSET', evidence_key(worker), request .. '|' .. stage, progress)
  call('EXPIRE', evidence_key(worker), EVIDENCE_S)
end
-- The task lost its owner. `how`: it "died", which was observed; its lease "lapsed", and it may
-- live; it "left"; a step "failed" as a whole; or the task was "revoked", or is "suspected" of a
-- death that was counted before. Raise the epoch and grant the task again to its role. Only an
-- observed death, or a failed step, counts against the task, and none if it was idle: after some
-- deaths since its last append it is a suspect, since another task of the batch may be their cause.
-- The request of a task that kills its workers alone too is condemned. The client's task is left
-- lost, until another gateway attaches. Returns true for a suspect, which is still to be granted,
-- by `grant_suspects`.
local function lose_unless_suspect(task, request, stage, how)
  local holder = call('HGET', task, 'holder') or ''
  local is_evidence = (how == 'died' or how == 'failed') and had_work(task, request)
  if how == 'lapsed' and holder ~= '' and had_work(task, request) then
    note_evidence(task, request, stage, holder)
  end
  local epoch = raise_epoch(task)
  local counted, group, role, state = unpack(
    call('HMGET', task, 'deaths', 'alone', 'role', 'state'))
  local deaths = is_evidence and count_death(task) or tonumber(counted or '0')
  local was_alone = is_evidence and group == '1'
  local died = (how == 'died' or how == 'lapsed') and {'died_worker', holder} or {}
  move(task, request, stage, 'lost', 'owner', '', unpack(died))
  -- The client's task is the gateway's, whose end the journal has; a granted one had no owner.
  if state == 'running' and stage ~= 'client' then
    call('HSET', task, 'lost_us', int(now_us()))
    write_journal('lost', 'worker', holder, 'role', role, 'request', request, 'stage', stage,
      'detail', how)
  end
  trace(request, 'lost', stage, epoch, holder, how)
  local lost = {
    type = 'TaskLost', request = request, stage = stage, epoch = 0, deaths = deaths,
    alone = was_alone,
  }
  publish_event(cjson.encode(lost):gsub('"epoch":0', '"epoch":' .. epoch))
  if stage == 'client' then return false end
  if was_alone and deaths > MAX_DEATHS then
    condemn(request, stage, deaths, holder)
  elseif deaths < MAX_DEATHS then
    grant_task(task, request, stage, role, '')
  elseif is_evidence or how == 'suspected' then
    return true
  else
    grant_task(task, request, stage, role, group ~= '' and group or '1')
  end
  return false
end
local function suspects_key(group) return PREFIX .. 'suspects:' .. group end
-- Grant suspects of the same deaths, as task key, request and stage, in two halves, each to run
-- without other tasks. A half that kills its worker is divided again, so a task that kills workers
-- is found among n in log n deaths, and the others continue meanwhile.
local function grant_suspects(suspects)
  local half, id = math.ceil(#suspects / 2), int(now_us())
  for number, suspect in ipairs(suspects) do
    local task, request, stage = unpack(suspect)
    local is_in_first = number <= half
    local is_alone = (is_in_first and half or #suspects - half) == 1
    local group = is_alone and '1' or id .. (is_in_first and 'a' or 'b')
    if not is_alone then
      call('SADD', suspects_key(group), request .. '|' .. stage)
      call('EXPIRE', suspects_key(group), EVIDENCE_S)
    end
    grant_task(task, request, stage, call('HGET', task, 'role'), group)
  end
end
local function lose_owner(task, request, stage, how)
  if lose_unless_suspect(task, request, stage, how) then
    grant_suspects({{task, request, stage}})
  end
end
-- Take a granted or running task from its owner, which is notified to release it before it can read
-- the next grant itself.
local function take_back(task, request, stage)
  local epoch, state = unpack(call('HMGET', task, 'epoch', 'state'))
  if state == 'granted' then
    withdraw(task, request, stage)
    return
  end
  local owner = remove_owner(task, request, stage)
  if owner and owner ~= '' then
    notify(owner, 'k', 'y', 'r', request, 's', stage, 'e', int(tonumber(epoch) + 1))
  end
end
-- The end of process `worker` was observed: count it against the tasks for which it was silent
-- before, unless they have progressed since. A task that is a suspect from now on is taken from its
-- present owner; a request whose task ran alone is condemned.
local function settle_evidence(worker)
  local evidence, suspects = call('HGETALL', evidence_key(worker)), {}
  call('DEL', evidence_key(worker))
  for i = 1, #evidence, 2 do
    local request, stage = string.match(evidence[i], '^(.-)|(.+)$')
    local produced, group = string.match(evidence[i + 1], '^(.-)|(.*)$')
    local task = task_key(request, stage)
    local state = call('HGET', task, 'state')
    if next_state('lost', state) and int(produced_by(task)) == produced then
      local deaths = count_death(task)
      if group == '1' and deaths > MAX_DEATHS then
        condemn(request, stage, deaths, worker)
      elseif deaths >= MAX_DEATHS and (call('HGET', task, 'alone') or '') == group
        and group ~= '1' then
        suspects[#suspects + 1] = {task, request, stage}
      end
    end
  end
  for _, suspect in ipairs(suspects) do
    local task, request, stage = unpack(suspect)
    take_back(task, request, stage)
    lose_unless_suspect(task, request, stage, 'suspected')
  end
  grant_suspects(suspects)
end
-- Revoke some of the tasks of a fenced worker or gateway, which ended as `how` says: Redis serves
-- nothing else meanwhile, and a gateway may hold thousands. While some are left, it is listed in
-- `fencing`, and the leader continues (`fence_tasks`).
local function lose_tasks_of(worker, how)
  local suspects, lost = {}, call('SPOP', tasks_of(worker), FENCE_SLICE)
  table.sort(lost)  -- the oldest request first
  for _, pair in ipairs(lost) do
    local request, stage = string.match(pair, '^(.-)|(.+)$')
    local task = task_key(request, stage)
    local owner, reserved_for = unpack(call('HMGET', task, 'owner', 'reserved_for'))
    if owner == worker then
      if lose_unless_suspect(task, request, stage, how) then
        suspects[#suspects + 1] = {task, request, stage}
      end
      call('HSET', task, 'holder', '')
    elseif reserved_for == worker then
      withdraw(task, request, stage)
      lose_owner(task, request, stage, 'left')
    end
  end
  grant_suspects(suspects)
  if call('EXISTS', tasks_of(worker)) == 1 then
    call('HSET', PREFIX .. 'fencing', worker, how)
  else
    call('HDEL', PREFIX .. 'fencing', worker)
  end
end
-- Stop granting to the worker; a standby worker takes its place. Tasks reserved for it and not
-- claimed are granted to others.
local function stop_granting(worker)
  local worker_key = PREFIX .. 'worker:' .. worker
  local role, standby, draining = unpack(call('HMGET', worker_key, 'role', 'standby', 'draining'))
  call('HSET', worker_key, 'draining', '1', 'standby', '')
  index_worker(worker)
  for _, pair in ipairs(call('SMEMBERS', tasks_of(worker))) do
    local request, stage = string.match(pair, '^(.-)|(.+)$')
    local task = task_key(request, stage)
    if call('HGET', task, 'reserved_for') == worker then
      withdraw(task, request, stage)
      lose_owner(task, request, stage, 'left')
    end
  end
  if role and standby ~= '1' and draining ~= '1' then promote(role) end
end
