-- add_version: compares that the worker is listed and does not stand by, if one is named; writes a version of the draft head under the next
-- number, unless there is one with the same hash. Answers the version, or "unlisted".
-- ARGV: worker ("": an operator), hash of the weights, the version as JSON with number 0
local w, sha, version = unpack(ARGV)
if w ~= '' and (not call('ZSCORE', P .. 'workers', w) or call('HGET', P .. 'worker:' .. w, 'standby') == '1') then return 'unlisted' end
local versions = P .. 'draft_versions'
local known = call('HGET', versions, 'sha:' .. sha)
if known then return call('HGET', versions, known) end
local number = int(call('HINCRBY', versions, 'last', 1))
version = string.gsub(version, '"number":0', '"number":' .. number, 1)
call('HSET', versions, number, version, 'sha:' .. sha, number)
return version
