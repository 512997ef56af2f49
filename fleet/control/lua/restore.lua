-- restore: writes a live request again that Redis has lost, without a bound: it was admitted
-- before. Compares that Redis does not know it, and that its gateway is listed: an unlisted one
-- registers first, or nobody would notice its end. The gateway holds the client edges at the epoch
-- that it names: only Redis could have given it. So a gateway that attached later takes them by its
-- higher epoch, and one that attached earlier does not.
-- ARGV: request, gateway, epoch (of the client edges), then written (the request as
-- `begin_request` takes it)
local request, gateway, epoch = unpack(ARGV, 1, 3)
local written = {unpack(ARGV, 4)}
if call('EXISTS', PREFIX .. 'req:' .. request) == 1 then return {'exists'} end
if not call('ZSCORE', PREFIX .. 'workers', gateway) then return {'unlisted'} end
call('HSET', task_key(request, 'client'), 'epoch', epoch)
begin_request(request, gateway, 'restored', written)
return {'ok', epoch}
