-- order: what people bid a worker do: "drain" takes nothing new, "resume" takes tasks again, "stop" leaves once it has done what it
-- has, "dump" logs where each of its threads is. Compares that the incarnation is listed and serves a role, and that it is not
-- leaving already; marks it, and tells it. One that is ordered to drain or stop is not expected to serve again. What is in force
-- already is said again, and changes nothing. A dump is only marked: the answer to the next renewal of the lease says it, since the
-- loop that reads the inbox may be what hangs. A line of the log says what was ordered, where that changes anything.
-- ARGV: worker, order
local w, order = unpack(ARGV)
local wk = P .. 'worker:' .. w
if not call('ZSCORE', P .. 'workers', w) then return call('EXISTS', P .. 'gone:' .. w) == 1 and 'gone' or 'unlisted' end
local is = call('HMGET', wk, 'role', 'leaving', 'draining')
if not is[1] or is[1] == '' then return 'gateway' end
if order == 'dump' then return call('HSET', wk, 'dump', '1') and 'ok' end
if is[2] == '1' then return order == 'resume' and 'leaving' or 'ok' end
if order == 'stop' or (order == 'resume') == (is[3] == '1') then
  local process, stage = labels_of(is[1])
  local held, r = held_by(w)
  log_line('info', process, w, stage, r, 'worker ' .. w .. ' is ordered to ' .. order .. '; it holds ' .. held)
  call('HDEL', wk, 'drained')
end
if order == 'resume' then call('HSET', wk, 'draining', '') else quieten(w) end
call('HSET', wk, 'ordered_off', order == 'resume' and '' or '1')
if order == 'stop' then call('HSET', wk, 'leaving', '1') end
notice(w, 'k', 'o', 'o', order)
return 'ok'
