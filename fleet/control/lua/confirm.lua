-- confirm: compares the new owner's epoch, request live, that the source still offers its blocks, and that it is listed (an unlisted
-- worker has reused them); confirms their import, once, and notifies the source to free them. Of confirm and release exactly one wins.
-- ARGV: request, stage, epoch
pass_when_full()
local r, s, epoch = unpack(ARGV)
local kk = kv_key(r, s)
local why, source = refused_offer(r, s, epoch)
if why then return why end
if not call('ZSCORE', P .. 'workers', source) then return 'released' end
call('HSET', kk, 'state', 'confirmed', 'data', '', 'confirmed_epoch', epoch)
trace(r, 'confirmed', s, epoch, call('HGET', task_key(r, s), 'owner'), 'from ' .. source)
notice(source, 'k', 'f', 'r', r)
return 'ok'
