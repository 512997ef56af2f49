-- claim_export: compares that the request is known and that no gateway has this right yet; writes
-- the gateway that alone sends the request's spans to a collector.
-- ARGV: request, gateway
local request, gateway = unpack(ARGV)
local request_key = PREFIX .. 'req:' .. request
if call('EXISTS', request_key) == 0 then return 'unknown' end
if call('HSETNX', request_key, 'exporter', gateway) == 0 then return 'taken' end
return 'ok'
