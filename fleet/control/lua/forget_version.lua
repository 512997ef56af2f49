-- forget_version: compares that the worker has the right to train, and that no stage uses the version of the draft head or would return to
-- it; deletes its record, so that its files may be removed. Answers "ok", "in_use", "stale" or "unlisted".
-- ARGV: worker, epoch, hash of the weights
pass_when_full()
local w, epoch, sha = unpack(ARGV)
local refusal, versions = training_refusal(w, epoch), P .. 'draft_versions'
if refusal then return refusal end
for _, used in ipairs(call('HVALS', P .. 'drafters')) do
  if used == sha then return 'in_use' end
end
local known = call('HGET', versions, sha)
if known then call('HDEL', versions, sha, 'note:' .. sha, 'number:' .. number_of_version(known)) end
return 'ok'
