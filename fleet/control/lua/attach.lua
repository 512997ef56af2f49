-- attach: gives the client edges of live requests to a gateway at a higher epoch, so that a stale
-- gateway can abort nothing, and notifies the former one, which ends its connection. A gateway that
-- has held them names its epoch: it is refused ("stale") if another holds them at a higher epoch.
-- An epoch above Redis's proves that Redis lost that gateway's own attach: then it still holds
-- them. One that continues a voice session is refused ("stale") once another gateway holds that
-- session. Repeating the call is harmless: its answer may have been lost. Answers "unlisted" if the
-- gateway is, else two words per request: "ok" and the epoch, or why not ("unknown": Redis has no
-- such request) and "".
-- ARGV: gateway, session (voice session that it continues; "" none), session_epoch (at which it
-- holds the session), then repeated 2: request, held (epoch at which it held the client edges; ""
-- takes them from any gateway)
local gateway, session, session_epoch = unpack(ARGV, 1, 3)
pass_when_full()
if not call('ZSCORE', PREFIX .. 'workers', gateway) then return {'unlisted'} end
local has_moved = session ~= ''
  and is_older(session_epoch, call('HGET', PREFIX .. 'voice:' .. session, 'epoch'))
local function attach(request, held)
  if call('SISMEMBER', PREFIX .. 'live', request) == 0 then
    return call('EXISTS', PREFIX .. 'req:' .. request) == 1 and 'ended' or 'unknown', ''
  end
  local task = task_key(request, 'client')
  local owner, present_epoch = unpack(call('HMGET', task, 'owner', 'epoch'))
  local other = owner and owner ~= '' and owner ~= gateway and owner
  if has_moved then return 'stale', '' end
  if other and held ~= '' and is_older(held, present_epoch) then return 'stale', '' end
  remove_owner(task, request, 'client')
  local epoch = raise_epoch(task, held)
  if other then notify(other, 'k', 'm', 'r', request, 'e', epoch) end
  move(task, request, 'client', 'attached', 'owner', gateway, 'holder', gateway)
  trace(request, 'attached', 'client', epoch, gateway)
  call('SADD', tasks_of(gateway), request .. '|client')
  local claimed = {
    type = 'TaskClaimed', request = request, stage = 'client', epoch = 0, owner = gateway,
  }
  publish_event(cjson.encode(claimed):gsub('"epoch":0', '"epoch":' .. epoch))
  return 'ok', epoch
end
local answers = {}
for i = 4, #ARGV, 2 do
  local request, held = unpack(ARGV, i, i + 1)
  answers[i - 3], answers[i - 2] = attach(request, held)
end
return answers
