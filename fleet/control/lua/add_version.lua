-- add_version: compares that the worker, if one is named, has the right to train; writes a version
-- of the draft head under its hash and the next number, unless there is one with the same hash. A
-- version that has a number keeps it unless another version has that number. Answers the version,
-- "stale" or "unlisted".
-- ARGV: worker ("": an operator), epoch, sha256 (of the weights), wanted (its number; "0": none
-- yet), newest (the highest number known elsewhere), version (as JSON with number 0)
local worker, epoch, sha256, wanted, newest, version = unpack(ARGV)
local versions = PREFIX .. 'draft_versions'
local refusal = training_refusal(worker, epoch)
if refusal then return refusal end
local known = call('HGET', versions, sha256)
if known then return known end
local last = math.max(tonumber(call('HGET', versions, 'last') or '0'), tonumber(newest))
local is_free = wanted ~= '0' and call('HEXISTS', versions, 'number:' .. wanted) == 0
local number = is_free and wanted or int(last + 1)
version = string.gsub(version, '"number":0', '"number":' .. number, 1)
last = math.max(last, tonumber(number))
call('HSET', versions, sha256, version, 'number:' .. number, sha256, 'last', int(last))
return version
