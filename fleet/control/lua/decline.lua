-- decline: compares the new owner's epoch, request live, and that the blocks are still offered;
-- withdraws them, and notifies their source to free them: the new owner cannot import them, and
-- computes the positions.
-- ARGV: request, stage, epoch
local request, stage, epoch = unpack(ARGV)
pass_when_full()
local refusal, source = refused_offer(request, stage, epoch)
if refusal then return refusal end
call('HSET', kv_key(request, stage), 'state', 'released', 'pages', '', 'loc', '', 'data', '')
trace(request, 'released', stage, epoch, source, 'it cannot be imported')
notify(source, 'k', 'f', 'r', request)
return 'ok'
