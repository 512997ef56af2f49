-- drain: compares that the incarnation is still listed; marks it as leaving: it keeps its lease and its tasks, and takes no more.
-- From then on it is no capacity: whoever counts workers of a role leaves it out.
-- ARGV: worker
local w = ARGV[1]
if not call('ZSCORE', P .. 'workers', w) then return 'unlisted' end
call('HSET', P .. 'worker:' .. w, 'draining', '1')
return 'ok'
