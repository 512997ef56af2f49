-- note_checkpoint: compares that the worker is listed and does not stand by; writes the name of the trainer's last durable checkpoint.
-- ARGV: worker, name
pass_when_full()
local w, name = unpack(ARGV)
if not call('ZSCORE', P .. 'workers', w) or call('HGET', P .. 'worker:' .. w, 'standby') == '1' then return 'unlisted' end
call('HSET', P .. 'training', 'checkpoint', name, 'trainer', w, 'saved_us', int(now_us()))
return 'ok'
