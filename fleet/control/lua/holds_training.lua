-- holds_training: answers "ok" if the worker has the right to train at this epoch, is listed and
-- does not stand by; else "stale" or "unlisted".
-- ARGV: worker, epoch
local worker, epoch = unpack(ARGV)
return training_refusal(worker, epoch) or 'ok'
