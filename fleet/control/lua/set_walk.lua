-- set_walk: compares the leader's term and that the request is live; writes the task's walk and notifies its owner.
-- A walk already set for that index stays: the first one wins.
-- ARGV: leader, request, stage, edge, from index, walk
pass_when_full()
local leader, r, s, e, from, walk = unpack(ARGV)
if not is_leader(leader) then return 'not_leader' end
if call('SISMEMBER', P .. 'live', r) == 0 then return 'ended' end
local tk = task_key(r, s)
if call('HSETNX', tk, 'walk:' .. e .. ':' .. from, walk) == 0 then return 'duplicate' end
call('HSET', tk, 'walk', walk)
local owner = call('HGET', tk, 'owner')
if owner and owner ~= '' then notice(owner, 'k', 'w', 'r', r, 'e', e, 'i', from, 'w', walk) end
return 'ok'
