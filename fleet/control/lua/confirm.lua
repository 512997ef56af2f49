-- confirm: compares the new owner's epoch, request live, that the source still offers its blocks,
-- and that it is listed (an unlisted worker has reused them); confirms their import, once, and
-- notifies the source to free them. Of confirm and release exactly one wins.
-- ARGV: request, stage, epoch
local request, stage, epoch = unpack(ARGV)
pass_when_full()
local refusal, source = refused_offer(request, stage, epoch)
if refusal then return refusal end
if not call('ZSCORE', PREFIX .. 'workers', source) then return 'released' end
call('HSET', kv_key(request, stage), 'state', 'confirmed', 'data', '', 'confirmed_epoch', epoch)
local owner = call('HGET', task_key(request, stage), 'owner')
trace(request, 'confirmed', stage, epoch, owner, 'from ' .. source)
notify(source, 'k', 'f', 'r', request)
return 'ok'
