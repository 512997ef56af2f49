-- admission: answers as submit would for a request that needs `roles`, with the number of further requests that would be admitted.
-- Writes nothing but the log line of a refusal.
-- ARGV: bound, request, gateway, roles, grace us, client, waits ("", "turn" or "soon")
local bound, r, gateway, roles, grace_us, client, waits = unpack(ARGV)
return admission_refusal(r, gateway, bound, roles, grace_us, client, waits) or {'ok', tonumber(bound) - call('SCARD', P .. 'live')}
