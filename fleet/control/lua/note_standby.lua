-- note_standby: compares that the anchor and the worker are listed, and that the worker is in no
-- listed anchor's route; records the span that the worker has loaded to stand by.
-- ARGV: anchor, worker, span
local anchor, worker, span = unpack(ARGV)
pass_when_full()
for _, each in ipairs({anchor, worker}) do
  if not call('ZSCORE', PREFIX .. 'workers', each) then return 'unlisted' end
end
local worker_key = PREFIX .. 'worker:' .. worker
local other = call('HGET', worker_key, 'anchor') or ''
if other ~= '' and call('ZSCORE', PREFIX .. 'workers', other) then return 'claimed' end
call('HSET', worker_key, 'span', span)
return 'ok'
