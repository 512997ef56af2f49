-- note_gap: compares that the anchor is listed; records which layers its route lacks ("" none), by which the readiness of its stage is
-- decided, and which span workers of it the others cannot replace, each with the reason, in JSON ("": of a division that never changes).
-- ARGV: anchor, gap, losses
pass_when_full()
local anchor, gap, losses = unpack(ARGV)
if not call('ZSCORE', P .. 'workers', anchor) then return 'unlisted' end
call('HSET', P .. 'worker:' .. anchor, 'gap', gap, 'losses', losses)
return 'ok'
