-- promote_version: compares that the worker, if one is named, is listed and does not stand by, and
-- has the right to train if it names an epoch; that the stage's version of the draft head is the
-- expected one ("*" any); and that the new version exists ("": the head of the start). Versions are
-- named by the hash of their weights. Writes the version, the one before, and why.
-- ARGV: worker ("": an operator), epoch ("" none), stage, expected (version), sha256 (of the new
-- version), reason
local worker, epoch, stage, expected, sha256, reason = unpack(ARGV)
local versions, drafters = PREFIX .. 'draft_versions', PREFIX .. 'drafters'
local refusal = training_refusal(worker, epoch)
if refusal then return refusal end
local present = call('HGET', drafters, stage .. ':version') or ''
if expected ~= '*' and present ~= expected then return 'stale' end
if sha256 ~= '' and call('HEXISTS', versions, sha256) == 0 then return 'unknown' end
if present == sha256 then return 'ok' end
-- Why a worker promoted the version, or replaced the present one by the one before.
local before = call('HGET', drafters, stage .. ':last_version') or ''
local noted = sha256 == before and present or sha256
if worker ~= '' and noted ~= '' then call('HSET', versions, 'note:' .. noted, reason) end
call('HSET', drafters, stage .. ':version', sha256, stage .. ':last_version', present)
local number = number_of_version(call('HGET', versions, sha256))
local former_number = number_of_version(call('HGET', versions, present))
log_fact('info', 'control', worker, stage, '',
  'version ' .. number .. ' of the draft head of ' .. stage .. ' takes the place of version ' ..
  former_number .. ': ' .. reason)
return 'ok'
