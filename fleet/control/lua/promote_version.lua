-- promote_version: compares that the worker, if one is named, is listed and does not stand by; that the stage's version of the draft head is
-- the expected one ("" any); and that the new version exists (0: the version of the start). Writes it, the one before, and why.
-- ARGV: worker ("": an operator), stage, expected version, new version, reason
local w, stage, expected, number, reason = unpack(ARGV)
if w ~= '' and (not call('ZSCORE', P .. 'workers', w) or call('HGET', P .. 'worker:' .. w, 'standby') == '1') then return 'unlisted' end
local present = call('HGET', P .. 'drafters', stage .. ':version') or '0'
if expected ~= '' and present ~= expected then return 'stale' end
if number ~= '0' and call('HEXISTS', P .. 'draft_versions', number) == 0 then return 'unknown' end
if present == number then return 'ok' end
-- Why a worker promoted the version, or replaced the present one by the one before.
local before = call('HGET', P .. 'drafters', stage .. ':last_version')
local noted = number == before and present or number
if w ~= '' and noted ~= '0' then call('HSET', P .. 'draft_versions', 'note:' .. noted, reason) end
call('HSET', P .. 'drafters', stage .. ':version', number, stage .. ':last_version', present)
log_fact('info', 'control', w, stage, '', 'version ' .. number .. ' of the draft head of ' .. stage .. ' takes the place of version ' .. present .. ': ' .. reason)
return 'ok'
