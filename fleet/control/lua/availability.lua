-- availability: reads, for each role, whether it admits new requests and keeps those in flight
-- ("1"), and how many of its workers are starting, with the percentage of the weights that the most
-- advanced has loaded ("" unknown). Writes nothing.
-- ARGV: grace_us, then roles
local grace_us = tonumber(ARGV[1])
local roles = {unpack(ARGV, 2)}
local answers = {}
for i, found in ipairs(availability(roles, grace_us)) do
  local admits, keeps = found.admits and '1' or '', found.keeps and '1' or ''
  answers[i] = {admits, keeps, found.starting, found.loaded or ''}
end
return answers
