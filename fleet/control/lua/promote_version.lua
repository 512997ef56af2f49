-- promote_version: compares that the worker, if one is named, is listed and does not stand by, and has the right to train if it names an
-- epoch; that the stage's version of the draft head is the expected one ("*" any); and that the new version exists ("": the head of the
-- start). Versions are named by the hash of their weights. Writes the version, the one before, and why.
-- ARGV: worker ("": an operator), epoch ("" none), stage, expected version, new version, reason
local w, epoch, stage, expected, sha, reason = unpack(ARGV)
local refusal, versions = training_refusal(w, epoch), P .. 'draft_versions'
if refusal then return refusal end
local present = call('HGET', P .. 'drafters', stage .. ':version') or ''
if expected ~= '*' and present ~= expected then return 'stale' end
if sha ~= '' and call('HEXISTS', versions, sha) == 0 then return 'unknown' end
if present == sha then return 'ok' end
-- Why a worker promoted the version, or replaced the present one by the one before.
local before = call('HGET', P .. 'drafters', stage .. ':last_version') or ''
local noted = sha == before and present or sha
if w ~= '' and noted ~= '' then call('HSET', versions, 'note:' .. noted, reason) end
call('HSET', P .. 'drafters', stage .. ':version', sha, stage .. ':last_version', present)
local number, former = number_of_version(call('HGET', versions, sha)), number_of_version(call('HGET', versions, present))
log_fact('info', 'control', w, stage, '', 'version ' .. number .. ' of the draft head of ' .. stage .. ' takes the place of version ' .. former .. ': ' .. reason)
return 'ok'
