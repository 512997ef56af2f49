-- attach: gives the client edges of a live request to a gateway at a higher epoch, so that a stale gateway can abort nothing.
-- ARGV: request, gateway
local r, gateway = unpack(ARGV)
if not call('ZSCORE', P .. 'workers', gateway) then return {'unlisted'} end
local tk = task_key(r, 'client')
if call('SISMEMBER', P .. 'live', r) == 0 then return {'ended'} end
disown(tk, r, 'client')
local epoch = raise(tk)
call('HSET', tk, 'state', 'running', 'owner', gateway, 'holder', gateway)
call('SADD', tasks_of(gateway), r .. '|client')
event(cjson.encode({type = 'TaskClaimed', request = r, stage = 'client', epoch = 0, owner = gateway})
  :gsub('"epoch":0', '"epoch":' .. epoch))
return {'ok', epoch}
