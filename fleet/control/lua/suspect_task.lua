-- suspect_task: compares epoch, that the task runs, and request live; a process died that computed layers for the task's owner, which
-- lives. Counts a death over the task. The task keeps its owner, unless it must run alone from now on, or ran alone: it is then granted
-- again at a higher epoch, or left lost, as if its owner had died (answer "lost").
-- ARGV: request, stage, epoch
pass_when_full()
local r, s, epoch = unpack(ARGV)
local tk = task_key(r, s)
local why = refusal_of(tk, r, epoch)
if why then return why end
if call('HGET', tk, 'alone') ~= '1' and deaths_with_one_more(tk) < MAX_DEATHS then
  count_death(tk)
  return 'ok'
end
remove_owner(tk, r, s)
lose_owner(tk, r, s, true)
return 'lost'
