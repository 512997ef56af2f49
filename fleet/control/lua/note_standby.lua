-- note_standby: compares that the anchor and the worker are listed, and that the worker is in no listed anchor's route; records the span
-- that the worker has loaded to stand by.
-- ARGV: anchor, worker, span
pass_when_full()
local anchor, w, span = unpack(ARGV)
for _, each in ipairs({anchor, w}) do
  if not call('ZSCORE', P .. 'workers', each) then return 'unlisted' end
end
local other = call('HGET', P .. 'worker:' .. w, 'anchor') or ''
if other ~= '' and call('ZSCORE', P .. 'workers', other) then return 'claimed' end
call('HSET', P .. 'worker:' .. w, 'span', span)
return 'ok'
