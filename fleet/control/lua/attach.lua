-- attach: gives the client edges of live requests to a gateway at a higher epoch, so that a stale gateway can abort nothing.
-- A fenced gateway reattaches ("instead of" its former id) only if no other gateway has attached since. Repeating the call is
-- harmless: its answer may have been lost. Answers "unlisted" if the gateway is, else two words per request: "ok" and the epoch, or
-- why not ("unknown": Redis has no such request) and "".
-- ARGV: gateway, then repeated 2: request, instead of ("" from any gateway)
local gateway = ARGV[1]
if not call('ZSCORE', P .. 'workers', gateway) then return {'unlisted'} end
local function attach(r, former)
  if call('SISMEMBER', P .. 'live', r) == 0 then return call('EXISTS', P .. 'req:' .. r) == 1 and 'ended' or 'unknown', '' end
  local tk = task_key(r, 'client')
  local owner = call('HGET', tk, 'owner')
  if former ~= '' and owner and owner ~= '' and owner ~= former and owner ~= gateway then return 'stale', '' end
  remove_owner(tk, r, 'client')
  local epoch = raise_epoch(tk)
  call('HSET', tk, 'state', 'running', 'owner', gateway, 'holder', gateway)
  trace(r, 'attached', 'client', epoch, gateway)
  call('SADD', tasks_of(gateway), r .. '|client')
  event(cjson.encode({type = 'TaskClaimed', request = r, stage = 'client', epoch = 0, owner = gateway})
    :gsub('"epoch":0', '"epoch":' .. epoch))
  return 'ok', epoch
end
local out = {}
for i = 2, #ARGV, 2 do out[i - 1], out[i] = attach(ARGV[i], ARGV[i + 1]) end
return out
