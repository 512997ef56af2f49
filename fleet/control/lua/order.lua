-- order: an operator's order to a worker: "drain" accepts no new tasks, "resume" accepts tasks
-- again, "stop" leaves once its tasks have ended, "dump" logs the stacks of its threads. Compares
-- that the worker is listed, serves a role and is not leaving already; records the order and
-- notifies the worker. After drain or stop it is not expected to serve again. An order already in
-- force is sent again and changes nothing. A dump is only recorded: the answer to the next lease
-- renewal carries it, since the loop that reads the inbox may be what hangs. An order that changes
-- anything is logged, and entered in the journal. A span worker whose layers an anchor uses may
-- leave only if another one is free, or if its anchor has recorded that others can have its layers
-- ("needed" otherwise, and why).
-- ARGV: worker, order, by (name of the API key that orders it; "" unknown)
local worker, order, by = unpack(ARGV)
pass_when_full()
local worker_key = PREFIX .. 'worker:' .. worker
if not call('ZSCORE', PREFIX .. 'workers', worker) then
  return call('EXISTS', PREFIX .. 'gone:' .. worker) == 1 and 'gone' or 'unlisted'
end
local role, leaving, draining = unpack(call('HMGET', worker_key, 'role', 'leaving', 'draining'))
if not role or role == '' then return 'gateway' end
if order == 'dump' then
  call('HSET', worker_key, 'dump', '1')
  return 'ok'
end
if leaving == '1' then return order == 'resume' and 'leaving' or 'ok' end
local function is_used(other)
  local anchor = call('HGET', PREFIX .. 'worker:' .. other, 'anchor') or ''
  return anchor ~= '' and call('ZSCORE', PREFIX .. 'workers', anchor)
end
-- Return why the anchor needs this worker: "" if it does not, nil if it has not recorded that.
local function recorded_need()
  local anchor = call('HGET', worker_key, 'anchor')
  local route, losses = unpack(call('HMGET', PREFIX .. 'worker:' .. anchor, 'route', 'losses'))
  if not losses or losses == '' then return nil end
  for _, hop in ipairs(cjson.decode(route)) do
    local other = hop[1]
    if other ~= worker and call('HGET', PREFIX .. 'worker:' .. other, 'draining') == '1' then
      return other .. ' is about to leave its route'
    end
  end
  return cjson.decode(losses)[worker] or ''
end
local function has_replacement()
  for _, status in ipairs({'accepting', 'standby'}) do
    local key = role_workers_key(role, status)
    for _, other in ipairs(call('ZRANGEBYSCORE', key, int(now_us()), '+inf')) do
      if other ~= worker and not is_used(other) then return true end
    end
  end
end
if order ~= 'resume' and is_used(worker) then
  local need = recorded_need()
  if need and need ~= '' then return {'needed', need} end
  if not need and not has_replacement() then return {'needed', ''} end
end
local changes = false
if order == 'stop' or (order == 'resume') == (draining == '1') then
  local process, stage = labels_of(role)
  local held, only_request = held_by(worker)
  log_fact('info', process, worker, stage, only_request,
    'worker ' .. worker .. ' is ordered to ' .. order .. '; it holds ' .. held)
  call('HDEL', worker_key, 'drained')
  changes = true
end
if order == 'resume' then
  call('HSET', worker_key, 'draining', '')
else
  stop_granting(worker)
end
call('HSET', worker_key, 'ordered_off', order == 'resume' and '' or '1')
index_worker(worker)
if changes then
  write_journal('ordered', 'worker', worker, 'role', role, 'by', by, 'detail', order,
    'serving', num_serving(role))
end
if order == 'stop' then call('HSET', worker_key, 'leaving', '1') end
notify(worker, 'k', 'o', 'o', order)
return 'ok'
