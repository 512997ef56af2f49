-- suspect_task: compares epoch, that the task runs, and request live; the connections of the
-- owner's route broke while the route computed layers for the task. A process of the route has
-- died, perhaps over this task: that counts once its end is observed, or now if it was.
-- ARGV: request, stage, epoch
local request, stage, epoch = unpack(ARGV)
pass_when_full()
local task = task_key(request, stage)
local refusal = refusal_of(task, request, epoch)
if refusal then return refusal end
local owner = call('HGET', task, 'owner')
local routes = call('HMGET', PREFIX .. 'worker:' .. owner, 'route', 'former_route')
local function each_worker(act)
  for _, route in ipairs(routes) do
    for _, hop in ipairs(route and route ~= '' and cjson.decode(route) or {}) do
      act(hop[1])
    end
  end
end
each_worker(function(worker) note_evidence(task, request, stage, worker) end)
each_worker(function(worker)
  if call('HGET', PREFIX .. 'gone:' .. worker, 'how') == 'died' then settle_evidence(worker) end
end)
return 'ok'
