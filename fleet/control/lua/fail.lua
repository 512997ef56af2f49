-- fail: compares epoch; writes the task's end and error, and an event. The conductor then ends the request.
-- ARGV: request, stage, epoch, event, code, message, param
local r, s, epoch, ev, code, message, param = unpack(ARGV)
local tk = task_key(r, s)
if call('HGET', tk, 'epoch') ~= epoch then return 'stale' end
if call('SISMEMBER', P .. 'live', r) == 0 then return 'ended' end
call('HSET', tk, 'state', 'failed', 'finished_us', int(now_us()), 'code', code, 'message', message, 'param', param)
disown(tk, r, s)
event(ev)
return 'ok'
