-- abort: compares the epoch of the client edges, unless the caller has the API's right ("api"); closes the request as aborted. An epoch
-- above Redis's comes from an attach that Redis lost.
-- ARGV: request, epoch of the client edges or "api", reason
pass_when_full()
local r, right, reason = unpack(ARGV)
if right ~= 'api' and is_older(right, call('HGET', task_key(r, 'client'), 'epoch')) then return 'stale' end
return close(r, 'aborted', 'aborted', reason, '')
