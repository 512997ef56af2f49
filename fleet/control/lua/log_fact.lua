-- log_fact: logs a fact that no other script writes, such as the death of a process that was not
-- registered.
-- ARGV: level, process, worker, stage, message
local level, process, worker, stage, message = unpack(ARGV)
pass_when_full()
log_fact(level, process, worker, stage, '', message)
return 'ok'
