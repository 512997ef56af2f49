-- forget_version: compares that the worker has the right to train, and that no stage uses the
-- version of the draft head or would return to it; deletes its record, so that its files may be
-- removed. Answers "ok", "in_use", "stale" or "unlisted".
-- ARGV: worker, epoch, sha256 (of the weights)
local worker, epoch, sha256 = unpack(ARGV)
pass_when_full()
local versions = PREFIX .. 'draft_versions'
local refusal = training_refusal(worker, epoch)
if refusal then return refusal end
for _, used in ipairs(call('HVALS', PREFIX .. 'drafters')) do
  if used == sha256 then return 'in_use' end
end
local known = call('HGET', versions, sha256)
if known then
  local number = number_of_version(known)
  call('HDEL', versions, sha256, 'note:' .. sha256, 'number:' .. number)
end
return 'ok'
