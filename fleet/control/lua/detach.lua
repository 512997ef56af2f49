-- detach: gives up the client edges of a request that no stream of the gateway reads: the reply to its attachment was lost, or Redis
-- lost that the request belongs to another gateway by now. Compares owner and epoch, and that the request is live. As after
-- the gateway's death, another gateway can attach, or the conductor aborts the request.
-- ARGV: request, gateway, epoch
pass_when_full()
local r, gateway, epoch = unpack(ARGV)
local tk = task_key(r, 'client')
local why = refusal_of(tk, r, epoch)
if why then return why end
if call('HGET', tk, 'owner') ~= gateway then return 'stale' end
remove_owner(tk, r, 'client')
lose_owner(tk, r, 'client', 'left')
call('HSET', tk, 'holder', '')
return 'ok'
