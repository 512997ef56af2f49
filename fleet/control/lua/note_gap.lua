-- note_gap: compares that the anchor is listed; records which layers its route lacks ("" none), by
-- which the readiness of its stage is decided, and which span workers of it the others cannot
-- replace, each with the reason, in JSON ("": of a division that never changes).
-- ARGV: anchor, gap, losses
local anchor, gap, losses = unpack(ARGV)
pass_when_full()
if not call('ZSCORE', PREFIX .. 'workers', anchor) then return 'unlisted' end
call('HSET', PREFIX .. 'worker:' .. anchor, 'gap', gap, 'losses', losses)
return 'ok'
