-- log_fact: logs a fact that no other script writes, such as the death of a process that was not registered.
-- ARGV: level, process, worker, stage, message
pass_when_full()
local level, process, w, s, message = unpack(ARGV)
log_fact(level, process, w, s, '', message)
return 'ok'
