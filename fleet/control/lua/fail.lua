-- fail: compares epoch, that the task runs, and request live; writes the task's end and error, and an event, and closes the request as
-- failed.
-- ARGV: request, stage, epoch, event, code, message, param
pass_when_full()
local r, s, epoch, ev, code, message, param = unpack(ARGV)
local tk = task_key(r, s)
local why = refusal_of(tk, r, epoch)
if why then return why end
move(tk, r, s, 'failed')
call('HSET', tk, 'finished_us', int(now_us()), 'code', code, 'message', message, 'param', param)
call('HSET', P .. 'req:' .. r, 'failed_stage', s)
trace(r, 'failed', s, epoch, remove_owner(tk, r, s), code .. ': ' .. message)
event(ev)
close(r, 'failed', code, message, param)
return 'ok'
