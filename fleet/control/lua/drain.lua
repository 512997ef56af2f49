-- drain: compares that the incarnation is still listed; marks it as leaving: it keeps its lease and its tasks, and takes no more.
-- From then on it is no capacity: whoever counts workers of a role leaves it out, and one that stands by takes its place. What was
-- put to it and is not claimed is lost to it.
-- ARGV: worker
local w = ARGV[1]
if not call('ZSCORE', P .. 'workers', w) then return 'unlisted' end
local is = call('HMGET', P .. 'worker:' .. w, 'role', 'standby', 'draining')
call('HSET', P .. 'worker:' .. w, 'draining', '1', 'standby', '')
for _, pair in ipairs(call('SMEMBERS', tasks_of(w))) do
  local r, s = string.match(pair, '^(.-)|(.+)$')
  if call('HGET', task_key(r, s), 'to') == w then
    withdraw(task_key(r, s), r, s)
    lose(task_key(r, s), r, s, false)
  end
end
if is[1] and is[2] ~= '1' and is[3] ~= '1' then promote(is[1]) end
return 'ok'
