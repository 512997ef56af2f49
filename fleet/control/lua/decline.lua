-- decline: compares the new owner's epoch, request live, and that the blocks are still offered; withdraws them, and notifies their source
-- to free them: the new owner cannot import them, and computes the positions.
-- ARGV: request, stage, epoch
pass_when_full()
local r, s, epoch = unpack(ARGV)
local kk = kv_key(r, s)
local why, source = refused_offer(r, s, epoch)
if why then return why end
call('HSET', kk, 'state', 'released', 'pages', '', 'loc', '', 'data', '')
trace(r, 'released', s, epoch, source, 'it cannot be imported')
notice(source, 'k', 'f', 'r', r)
return 'ok'
