-- end_request: compares the leader's term; closes the request as failed. A request that killed the workers of a
-- stage also becomes a dead letter, with everything needed to submit it again. The oldest letters are removed beyond a number and a size.
-- ARGV: leader, request, state, code, message, param, dead stage
pass_when_full()
local function keep_letter(r, stage, why)
  local spec, blob = call('HGET', P .. 'req:' .. r, 'spec'), call('GET', P .. 'req:' .. r .. ':blob') or ''
  local bytes = #spec + #blob
  if blob ~= '' then call('SET', P .. 'dead_letter:' .. r .. ':blob', blob) end
  call('XADD', P .. 'dead_letters', '*', 'r', r, 's', stage, 'why', why, 'spec', spec, 'n', bytes)
  local letters, num, total = call('XREVRANGE', P .. 'dead_letters', '+', '-'), 0, 0
  for _, letter in ipairs(letters) do
    local of = letter[2]  -- field names and values in turn
    num, total = num + 1, total + tonumber(of[10])
    if num > 1 and (num > MAX_DEAD or total > MAX_DEAD_BYTES) then
      call('XDEL', P .. 'dead_letters', letter[1])
      call('UNLINK', P .. 'dead_letter:' .. of[2] .. ':blob')
    end
  end
end
local leader, r, state, code, message, param, dead = unpack(ARGV)
if not is_leader(leader) then return 'not_leader' end
if dead ~= '' and call('SISMEMBER', P .. 'live', r) == 1 then
  call('HSET', P .. 'req:' .. r, 'failed_stage', dead)
  keep_letter(r, dead, message)
  local worker = call('HGET', task_key(r, dead), 'died_worker') or ''
  log_fact('error', 'conductor', worker, dead, r, 'request ' .. r .. ' is a dead letter: ' .. message .. '; the last was ' ..
    (worker ~= '' and worker or 'unknown') .. '; `fleet dead-letters list` shows it')
end
return close(r, state, code, message, param)
