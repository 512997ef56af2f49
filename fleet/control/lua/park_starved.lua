-- park_starved: compares epoch, that the task runs, and request live; removes the owner of a task that waits for input from a parked task,
-- with which it is granted again. No death is counted. Answers "input" and changes nothing if no producer named here is parked, or if
-- chunks have arrived.
-- ARGV: request, stage, epoch, then repeated 3: input edge, its producer's stage, chunks consumed
pass_when_full()
local r, s, epoch = unpack(ARGV, 1, 3)
local tk = task_key(r, s)
local why = refusal_of(tk, r, epoch)
if why then return why end
local parked = {}
for i = 4, #ARGV, 3 do
  local p = call('HMGET', task_key(r, ARGV[i + 1]), 'state', 'produced:' .. ARGV[i])
  if tonumber(p[2] or '0') > tonumber(ARGV[i + 2]) then return 'input' end
  if p[1] == 'parked' then parked[#parked + 1] = ARGV[i + 1] end
end
if #parked == 0 then return 'input' end
for _, producer in ipairs(parked) do
  local pk = task_key(r, producer)
  call('HSET', pk, 'starved', (call('HGET', pk, 'starved') or '') .. s .. ',')
end
local w = remove_owner(tk, r, s)
move(tk, r, s, 'parked')
call('HSET', tk, 'parked_by', w)
trace(r, 'parked', s, epoch, w, 'no input from ' .. table.concat(parked, ', '))
return 'parked'
