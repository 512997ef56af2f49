-- end_request: compares the leader's term; closes the request as finished, failed or aborted.
-- ARGV: leader, request, state, code, message, param, retention s, client edge retention s
local leader, r, state, code, message, param, retention, client = unpack(ARGV)
if not leads(leader) then return 'not_leader' end
return close(r, state, code, message, param, retention, client) == 1 and 'ok' or 'ended'
