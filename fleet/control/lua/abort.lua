-- abort: compares the epoch of the client edges, unless the caller has the API's right ("api"), or
-- an operator's ("operator"), whose order is entered in the journal; closes the request as aborted.
-- An epoch above Redis's comes from an attach that Redis lost.
-- ARGV: request, right (epoch of the client edges, "api" or "operator"), reason, by (name of an
-- operator's API key)
local request, right, reason, by = unpack(ARGV)
pass_when_full()
local has_right = right == 'api' or right == 'operator'
if not has_right and is_older(right, call('HGET', task_key(request, 'client'), 'epoch')) then
  return 'stale'
end
local answer = close(request, 'aborted', 'aborted', reason, '')
if right == 'operator' and answer == 'ok' then
  write_journal('ordered', 'request', request, 'by', by, 'detail', 'cancel')
end
return answer
