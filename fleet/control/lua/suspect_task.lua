-- suspect_task: compares epoch, that the task runs, and request live; the connections of the owner's route broke while the route computed
-- layers for the task. A process of the route has died, perhaps over this task: that counts once its end is observed, or now if it was.
-- ARGV: request, stage, epoch
pass_when_full()
local r, s, epoch = unpack(ARGV)
local tk = task_key(r, s)
local why = refusal_of(tk, r, epoch)
if why then return why end
local routes = call('HMGET', P .. 'worker:' .. call('HGET', tk, 'owner'), 'route', 'former_route')
for _, route in ipairs(routes) do
  for _, hop in ipairs(route and route ~= '' and cjson.decode(route) or {}) do note_evidence(tk, r, s, hop[1]) end
end
for _, route in ipairs(routes) do
  for _, hop in ipairs(route and route ~= '' and cjson.decode(route) or {}) do
    if call('HGET', P .. 'gone:' .. hop[1], 'how') == 'died' then settle_evidence(hop[1]) end
  end
end
return 'ok'
