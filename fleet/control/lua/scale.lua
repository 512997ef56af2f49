-- scale: a person orders how many workers of a role accept tasks. Compares that a `fleet up` which
-- starts and stops workers is present ("unmanaged" otherwise). Writes the number, in place of the
-- configuration's, lets standby workers of the role fill it, and enters a change in the log and the
-- journal. The same number again changes nothing.
-- ARGV: role, number, by (name of the API key that orders it; "" unknown)
local role, number, by = unpack(ARGV)
if call('ZCOUNT', PREFIX .. 'supervisors', int(now_us()), '+inf') == 0 then return 'unmanaged' end
if call('HGET', PREFIX .. 'wanted', role) == number then return 'ok' end
call('HSET', PREFIX .. 'wanted', role, number)
local wanted = number .. (number == '1' and ' worker' or ' workers') .. ' wanted'
local process, stage = labels_of(role)
log_fact('info', process, '', stage, '', role .. ': ' .. wanted)
write_journal('ordered', 'role', role, 'by', by, 'detail', wanted)
local serving = call('ZCOUNT', role_workers_key(role, 'accepting'), int(now_us()), '+inf')
for _ = serving + 1, tonumber(number) do promote(role) end
return 'ok'
