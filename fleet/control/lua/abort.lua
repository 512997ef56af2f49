-- abort: compares the epoch of the client edges, unless the caller has the API's right ("api");
-- closes the request as aborted. An epoch above Redis's comes from an attach that Redis lost.
-- ARGV: request, right (epoch of the client edges or "api"), reason
local request, right, reason = unpack(ARGV)
pass_when_full()
if right ~= 'api' and is_older(right, call('HGET', task_key(request, 'client'), 'epoch')) then
  return 'stale'
end
return close(request, 'aborted', 'aborted', reason, '')
