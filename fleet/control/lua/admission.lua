-- admission: answers as submit would for a request that needs `roles`, with the number of further
-- requests that would be admitted. Writes nothing but the log line of a refusal.
-- ARGV: bound, request, gateway, roles, grace_us, client, waits ("", "turn" or "soon"), key,
-- key_bound (live requests of the key), audio_bound (s a day)
local bound, request, gateway, roles, grace_us, client, waits, key, key_bound, audio_bound =
  unpack(ARGV)
local refusal = key_refusal(key, key_bound, audio_bound)
  or admission_refusal(request, gateway, bound, roles, grace_us, client, waits)
return refusal or {'ok', tonumber(bound) - call('SCARD', PREFIX .. 'live')}
