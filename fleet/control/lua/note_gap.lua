-- note_gap: compares that the anchor is listed; records which layers its route lacks ("" none), by which the readiness of its stage is
-- decided.
-- ARGV: anchor, gap
pass_when_full()
local anchor, gap = unpack(ARGV)
if not call('ZSCORE', P .. 'workers', anchor) then return 'unlisted' end
call('HSET', P .. 'worker:' .. anchor, 'gap', gap)
return 'ok'
