-- submit: compares that the request is new, that its gateway is listed, the queue bound, and that
-- each of `roles` has or expects a worker; writes the request, `live`, an event and the client task
-- attached to its gateway, and grants one task per stage (`begin_request`). One that `waits` for
-- its turn is answered "full" until it has it.
-- A request of an API key at one of its limits is answered "key_limit", the limit and a time (s).
-- Refused for its roles, it answers "no_worker", the time until a retry (us), and the roles.
-- One that an operator ordered, a retry, is entered in the journal.
-- ARGV: request, gateway, bound, roles, grace_us, waits ("", "turn" or "soon"), key_bound (live
-- requests of its key), audio_bound (s a day), ordered ("1" by an operator), by (name of the
-- operator's API key), then
-- written (the request as `begin_request` takes it)
local request, gateway, bound, roles, grace_us, waits, key_bound, audio_bound, ordered, by =
  unpack(ARGV, 1, 10)
local written = {unpack(ARGV, 11)}
local client, key = unpack(written, 14, 15)
if call('EXISTS', PREFIX .. 'req:' .. request) == 1 then return {'exists'} end
if not call('ZSCORE', PREFIX .. 'workers', gateway) then return {'stale'} end
local refusal = key_refusal(key, key_bound, audio_bound)
  or admission_refusal(request, gateway, bound, roles, grace_us, client, waits)
if refusal then return refusal end
local epoch = raise_epoch(task_key(request, 'client'))
count('submitted')
begin_request(request, gateway, 'submitted', written)
if ordered == '1' then
--rest
  write_journal('ordered', 'request', request, 'by', by, 'detail', 'retry')
end
return {'ok', epoch}
