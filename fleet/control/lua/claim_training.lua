-- claim_training: compares that the worker is listed and does not stand by, and that no other listed worker has the right to train and
-- still owns tasks; gives it the right, at an epoch above all former ones and above `newest`, which Redis may have lost.
-- Answers "ok", the epoch and the former one; "unlisted"; or "held".
-- ARGV: worker, newest epoch in the trainers' folder
pass_when_full()
local w, newest = unpack(ARGV)
local refusal, key = training_refusal(w, ''), P .. 'training'
if refusal then return {refusal} end
local of = call('HMGET', key, 'trainer', 'epoch')
local other = of[1] or ''
if other ~= '' and other ~= w and call('ZSCORE', P .. 'workers', other) and call('EXISTS', tasks_of(other)) == 1 then return {'held'} end
call('HSET', key, 'trainer', w)
return {'ok', raise_epoch(key, newest), of[2] or '0'}
