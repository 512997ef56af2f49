-- attach: gives the client edges of a live request to a gateway at a higher epoch, so that a stale gateway can abort nothing.
-- A gateway that was fenced takes back only what nobody has taken since ("instead of" its former id); asked again, for its answer may
-- have been lost, it takes it once more.
-- ARGV: request, gateway, instead of ("" from whoever holds it)
local r, gateway, former = unpack(ARGV)
if not call('ZSCORE', P .. 'workers', gateway) then return {'unlisted'} end
local tk = task_key(r, 'client')
if call('SISMEMBER', P .. 'live', r) == 0 then return {'ended'} end
local owner = call('HGET', tk, 'owner')
if former ~= '' and owner and owner ~= '' and owner ~= former and owner ~= gateway then return {'stale'} end
disown(tk, r, 'client')
local epoch = raise(tk)
call('HSET', tk, 'state', 'running', 'owner', gateway, 'holder', gateway)
mark(r, 'attached', 'client', epoch, gateway)
call('SADD', tasks_of(gateway), r .. '|client')
event(cjson.encode({type = 'TaskClaimed', request = r, stage = 'client', epoch = 0, owner = gateway})
  :gsub('"epoch":0', '"epoch":' .. epoch))
return {'ok', epoch}
