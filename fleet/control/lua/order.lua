-- order: an operator's order to a worker: "drain" accepts no new tasks, "resume" accepts tasks again, "stop" leaves once its tasks
-- have ended, "dump" logs the stacks of its threads. Compares that the worker is listed, serves a role and is not leaving already;
-- records the order and notifies the worker. After drain or stop it is not expected to serve again. An order already in force is sent
-- again and changes nothing. A dump is only recorded: the answer to the next lease renewal carries it, since the loop that reads the
-- inbox may be what hangs. An order that changes anything is logged. A span worker whose layers an anchor uses may leave only if another
-- one is free, or if its anchor has recorded that others can have its layers ("needed" otherwise, and why).
-- ARGV: worker, order
pass_when_full()
local w, order = unpack(ARGV)
local wk = P .. 'worker:' .. w
if not call('ZSCORE', P .. 'workers', w) then return call('EXISTS', P .. 'gone:' .. w) == 1 and 'gone' or 'unlisted' end
local is = call('HMGET', wk, 'role', 'leaving', 'draining')
if not is[1] or is[1] == '' then return 'gateway' end
if order == 'dump' then return call('HSET', wk, 'dump', '1') and 'ok' end
if is[2] == '1' then return order == 'resume' and 'leaving' or 'ok' end
local function is_used(other)
  local anchor = call('HGET', P .. 'worker:' .. other, 'anchor') or ''
  return anchor ~= '' and call('ZSCORE', P .. 'workers', anchor)
end
-- Return why the anchor needs this worker: "" if it does not, nil if it has not recorded that.
local function recorded_need()
  local route, losses = unpack(call('HMGET', P .. 'worker:' .. call('HGET', wk, 'anchor'), 'route', 'losses'))
  if not losses or losses == '' then return nil end
  for _, hop in ipairs(cjson.decode(route)) do
    if hop[1] ~= w and call('HGET', P .. 'worker:' .. hop[1], 'draining') == '1' then return hop[1] .. ' is about to leave its route' end
  end
  return cjson.decode(losses)[w] or ''
end
local function has_replacement()
  for _, status in ipairs({'accepting', 'standby'}) do
    for _, other in ipairs(call('ZRANGEBYSCORE', role_workers_key(is[1], status), int(now_us()), '+inf')) do
      if other ~= w and not is_used(other) then return true end
    end
  end
end
if order ~= 'resume' and is_used(w) then
  local need = recorded_need()
  if need and need ~= '' then return {'needed', need} end
  if not need and not has_replacement() then return {'needed', ''} end
end
if order == 'stop' or (order == 'resume') == (is[3] == '1') then
  local process, stage = labels_of(is[1])
  local held, r = held_by(w)
  log_fact('info', process, w, stage, r, 'worker ' .. w .. ' is ordered to ' .. order .. '; it holds ' .. held)
  call('HDEL', wk, 'drained')
end
if order == 'resume' then call('HSET', wk, 'draining', '') else stop_granting(w) end
call('HSET', wk, 'ordered_off', order == 'resume' and '' or '1')
index_worker(w)
if order == 'stop' then call('HSET', wk, 'leaving', '1') end
notice(w, 'k', 'o', 'o', order)
return 'ok'
