-- Credit, and tasks that wait for it without a worker.

local ENDLESS = '9000000000000000'
-- Return how many chunks of an edge its consumer has acknowledged, as text; without a bound if it
-- reads no more.
local function consumed_of(request, edge, consumer)
  local consumed, state, closed = unpack(call('HMGET', task_key(request, consumer),
    'consumed:' .. edge, 'state', 'closed:' .. edge))
  return (state == 'finished' or closed) and ENDLESS or consumed or '0'
end
-- Grant a parked task again: to the worker that parked it if that has room, since what the task
-- published is there, else to its role. Tasks that are parked because this one gives them no input
-- are granted with it, unless they have parked since, for credit of their own.
local function unpark(task, request, stage, how)
  local role, alone, parked_by, starved_stages = unpack(
    call('HMGET', task, 'role', 'alone', 'parked_by', 'starved'))
  call('HDEL', task, 'waits', 'parked_by', 'starved')
  local may_share = (alone or '') == ''
  local worker = may_share and with_room(parked_by, role) or nil
  grant_task(task, request, stage, role, alone or '', worker, how)
  for _, starved in ipairs(split(starved_stages)) do
    local state, waits = unpack(call('HMGET', task_key(request, starved), 'state', 'waits'))
    if state == 'parked' and not waits then
      unpark(task_key(request, starved), request, starved, how)
    end
  end
end
-- Grant a task again if it is parked, and every edge for which it waits has credit: its consumer
-- has acknowledged enough chunks.
local function unpark_if_due(request, stage)
  local task = task_key(request, stage)
  local state, waits = unpack(call('HMGET', task, 'state', 'waits'))
  if state ~= 'parked' then return end
  for _, wait in ipairs(split(waits)) do
    local edge, consumer, enough = string.match(wait, '^(.-)|(.-)|(%d+)$')
    if tonumber(consumed_of(request, edge, consumer)) < tonumber(enough) then return end
  end
  unpark(task, request, stage, ', which has credit')
end
