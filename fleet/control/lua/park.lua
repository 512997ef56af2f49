-- park: compares epoch, that the task runs, and request live; removes the owner of a task that waits for credit. Its slot is free, its logs
-- are its state, and `ack` grants it again once every edge named here has credit. No death is counted. If credit arrived meanwhile, nothing
-- changes, and the answer is "credit" and the chunks consumed of each edge.
-- ARGV: request, stage, epoch, then repeated 3: output edge without credit, its consumer's stage, chunks that must be consumed
pass_when_full()
local r, s, epoch = unpack(ARGV, 1, 3)
local tk = task_key(r, s)
local why = refusal_of(tk, r, epoch)
if why then return {why} end
local answer, waits, edges, lacks_credit = {'credit'}, {}, {}, false
for i = 4, #ARGV, 3 do
  local consumed = consumed_of(r, ARGV[i], ARGV[i + 1])
  answer[#answer + 1], waits[#waits + 1], edges[#edges + 1] = consumed, table.concat(ARGV, '|', i, i + 2), ARGV[i]
  lacks_credit = lacks_credit or tonumber(consumed) < tonumber(ARGV[i + 2])
end
if not lacks_credit then return answer end
local w = remove_owner(tk, r, s)
move(tk, r, s, 'parked')
call('HSET', tk, 'waits', table.concat(waits, ','), 'parked_by', w)
trace(r, 'parked', s, epoch, w, 'no credit on ' .. table.concat(edges, ', '))
return {'parked'}
