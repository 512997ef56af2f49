-- attach: gives the client edges of a live request to a gateway at a higher epoch, so that a stale gateway can abort nothing.
-- A fenced gateway reattaches ("instead of" its former id) only if no other gateway has attached since. Repeating the call is
-- harmless: its answer may have been lost.
-- ARGV: request, gateway, instead of ("" from any gateway)
pass_when_full()
local r, gateway, former = unpack(ARGV)
if not call('ZSCORE', P .. 'workers', gateway) then return {'unlisted'} end
local tk = task_key(r, 'client')
if call('SISMEMBER', P .. 'live', r) == 0 then return {'ended'} end
local owner = call('HGET', tk, 'owner')
if former ~= '' and owner and owner ~= '' and owner ~= former and owner ~= gateway then return {'stale'} end
remove_owner(tk, r, 'client')
local epoch = raise_epoch(tk)
call('HSET', tk, 'state', 'running', 'owner', gateway, 'holder', gateway)
trace(r, 'attached', 'client', epoch, gateway)
call('SADD', tasks_of(gateway), r .. '|client')
event(cjson.encode({type = 'TaskClaimed', request = r, stage = 'client', epoch = 0, owner = gateway})
  :gsub('"epoch":0', '"epoch":' .. epoch))
return {'ok', epoch}
