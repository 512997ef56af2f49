-- drain: compares that the incarnation is still listed; marks it as leaving, by its own word: it keeps its lease and its tasks, and
-- takes no more. From then on it is no capacity: whoever counts workers of a role leaves it out. It takes no more orders.
-- ARGV: worker
local w = ARGV[1]
if not call('ZSCORE', P .. 'workers', w) then return 'unlisted' end
quieten(w)
call('HSET', P .. 'worker:' .. w, 'leaving', '1')
return 'ok'
