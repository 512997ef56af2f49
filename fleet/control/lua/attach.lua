-- attach: gives the client edges of a live request to a gateway at a higher epoch, so that a stale gateway can abort nothing, and
-- notifies the former one, which ends its connection. A gateway that has held them names its epoch: it is refused ("stale") if another
-- holds them at a higher epoch. An epoch above Redis's proves that Redis lost that gateway's own attach: then it still holds them.
-- Repeating the call is harmless: its answer may have been lost.
-- ARGV: request, gateway, epoch at which it held the client edges ("" takes them from any gateway)
local r, gateway, held = unpack(ARGV)
if not call('ZSCORE', P .. 'workers', gateway) then return {'unlisted'} end
local tk = task_key(r, 'client')
if call('SISMEMBER', P .. 'live', r) == 0 then return {'ended'} end
local t = call('HMGET', tk, 'owner', 'epoch')
local other = t[1] and t[1] ~= '' and t[1] ~= gateway and t[1]
if other and held ~= '' and is_older(held, t[2]) then return {'stale'} end
remove_owner(tk, r, 'client')
local epoch = raise_epoch(tk, held)
if other then notice(other, 'k', 'm', 'r', r, 'e', epoch) end
call('HSET', tk, 'state', 'running', 'owner', gateway, 'holder', gateway)
trace(r, 'attached', 'client', epoch, gateway)
call('SADD', tasks_of(gateway), r .. '|client')
event(cjson.encode({type = 'TaskClaimed', request = r, stage = 'client', epoch = 0, owner = gateway})
  :gsub('"epoch":0', '"epoch":' .. epoch))
return {'ok', epoch}
