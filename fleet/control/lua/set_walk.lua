-- set_walk: compares the leader's term; writes the walk to which the consumer of a chunk changes
-- there, and notifies the task's owner, if the request is live. The first walk that is set for a
-- chunk stays. Deletes the boundary, which asked for this decision.
-- ARGV: leader, boundary, request, stage, edge, from_index, walk ("": the consumer keeps its walk)
local leader, boundary, request, stage, edge, from_index, walk = unpack(ARGV)
pass_when_full()
if not is_leader(leader) then return 'not_leader' end
call('XDEL', PREFIX .. 'boundaries', boundary)
if call('SISMEMBER', PREFIX .. 'live', request) == 0 then return 'ended' end
local task = task_key(request, stage)
if walk == '' then return 'duplicate' end
if call('HSETNX', task, 'walk:' .. edge .. ':' .. from_index, walk) == 0 then return 'duplicate' end
call('HSET', task, 'walk', walk)
local owner = call('HGET', task, 'owner')
if owner and owner ~= '' then
  notify(owner, 'k', 'w', 'r', request, 'e', edge, 'i', from_index, 'w', walk)
end
return 'ok'
