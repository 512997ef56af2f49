-- add_version: compares that the worker, if one is named, has the right to train; writes a version of the draft head under its hash and the
-- next number, unless there is one with the same hash. A version that has a number keeps it unless another version has that number.
-- Answers the version, "stale" or "unlisted".
-- ARGV: worker ("": an operator), epoch, hash of the weights, number ("0": none yet), highest number known elsewhere, the version as JSON
-- with number 0
local w, epoch, sha, wanted, newest, version = unpack(ARGV)
local refusal, versions = training_refusal(w, epoch), P .. 'draft_versions'
if refusal then return refusal end
local known = call('HGET', versions, sha)
if known then return known end
local last = math.max(tonumber(call('HGET', versions, 'last') or '0'), tonumber(newest))
local number = wanted ~= '0' and call('HEXISTS', versions, 'number:' .. wanted) == 0 and wanted or int(last + 1)
version = string.gsub(version, '"number":0', '"number":' .. number, 1)
call('HSET', versions, sha, version, 'number:' .. number, sha, 'last', int(math.max(last, tonumber(number))))
return version
