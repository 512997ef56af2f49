-- adopt_prefix: compares that the worker is listed; writes that it caches rows of a session of a
-- stage, with a time to live. For a session that was loaded from a file, and so belongs to no
-- request.
-- ARGV: worker, stage, session, ttl_ms
local worker, stage, session, ttl_ms = unpack(ARGV)
if not call('ZSCORE', PREFIX .. 'workers', worker) then return 'stale' end
local cached_prefix = PREFIX .. 'cached_prefix:' .. session
call('HSET', cached_prefix, stage, worker)
call('PEXPIRE', cached_prefix, ttl_ms)
return 'ok'
