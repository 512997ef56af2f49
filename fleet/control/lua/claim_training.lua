-- claim_training: compares that the worker is listed and does not stand by, and that no other
-- listed worker has the right to train and still owns tasks; gives it the right, at an epoch above
-- all former ones and above `newest`, which Redis may have lost. Answers "ok", the epoch and the
-- former one; "unlisted"; or "held".
-- ARGV: worker, newest (epoch in the trainers' folder)
local worker, newest = unpack(ARGV)
pass_when_full()
local key = PREFIX .. 'training'
local refusal = training_refusal(worker, '')
if refusal then return {refusal} end
local trainer, former_epoch = unpack(call('HMGET', key, 'trainer', 'epoch'))
if trainer and trainer ~= '' and trainer ~= worker then
  local is_listed = call('ZSCORE', PREFIX .. 'workers', trainer)
  if is_listed and call('EXISTS', tasks_of(trainer)) == 1 then return {'held'} end
end
call('HSET', key, 'trainer', worker)
return {'ok', raise_epoch(key, newest), former_epoch or '0'}
