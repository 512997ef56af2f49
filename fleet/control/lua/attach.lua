-- attach: gives the client edges of live requests to a gateway at a higher epoch, so that a stale gateway can abort nothing, and
-- notifies the former one, which ends its connection. A gateway that has held them names its epoch: it is refused ("stale") if another
-- holds them at a higher epoch. An epoch above Redis's proves that Redis lost that gateway's own attach: then it still holds them.
-- Repeating the call is harmless: its answer may have been lost. Answers "unlisted" if the gateway is, else two words per request:
-- "ok" and the epoch, or why not ("unknown": Redis has no such request) and "".
-- ARGV: gateway, then repeated 2: request, epoch at which it held the client edges ("" takes them from any gateway)
pass_when_full()
local gateway = ARGV[1]
if not call('ZSCORE', P .. 'workers', gateway) then return {'unlisted'} end
local function attach(r, held)
  if call('SISMEMBER', P .. 'live', r) == 0 then return call('EXISTS', P .. 'req:' .. r) == 1 and 'ended' or 'unknown', '' end
  local tk = task_key(r, 'client')
  local t = call('HMGET', tk, 'owner', 'epoch')
  local other = t[1] and t[1] ~= '' and t[1] ~= gateway and t[1]
  if other and held ~= '' and is_older(held, t[2]) then return 'stale', '' end
  remove_owner(tk, r, 'client')
  local epoch = raise_epoch(tk, held)
  if other then notice(other, 'k', 'm', 'r', r, 'e', epoch) end
  move(tk, r, 'client', 'attached')
  call('HSET', tk, 'owner', gateway, 'holder', gateway)
  trace(r, 'attached', 'client', epoch, gateway)
  call('SADD', tasks_of(gateway), r .. '|client')
  event(cjson.encode({type = 'TaskClaimed', request = r, stage = 'client', epoch = 0, owner = gateway})
    :gsub('"epoch":0', '"epoch":' .. epoch))
  return 'ok', epoch
end
local out = {}
for i = 2, #ARGV, 2 do out[i - 1], out[i] = attach(ARGV[i], ARGV[i + 1]) end
return out
