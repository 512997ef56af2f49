-- detach: gives up the client edges of a request that no stream of the gateway reads: the reply to
-- its attachment was lost, or Redis lost that the request belongs to another gateway by now.
-- Compares owner and epoch, and that the request is live. As after the gateway's death, another
-- gateway can attach, or the conductor aborts the request.
-- ARGV: request, gateway, epoch
local request, gateway, epoch = unpack(ARGV)
pass_when_full()
local task = task_key(request, 'client')
local refusal = refusal_of(task, request, epoch)
if refusal then return refusal end
if call('HGET', task, 'owner') ~= gateway then return 'stale' end
remove_owner(task, request, 'client')
lose_owner(task, request, 'client', 'left')
call('HSET', task, 'holder', '')
return 'ok'
