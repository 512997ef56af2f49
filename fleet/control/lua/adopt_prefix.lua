-- adopt_prefix: compares that the worker is listed; writes that it caches rows of a session of a stage, with a time to live. For a session
-- that was loaded from a file, and so belongs to no request.
-- ARGV: worker, stage, session, ms
local w, s, session, ttl_ms = unpack(ARGV)
if not call('ZSCORE', P .. 'workers', w) then return 'stale' end
call('HSET', P .. 'cached_prefix:' .. session, s, w)
call('PEXPIRE', P .. 'cached_prefix:' .. session, ttl_ms)
return 'ok'
