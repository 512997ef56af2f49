-- availability: reads, for each role, whether it admits new requests and keeps those in flight ("1"), and how many of its workers are
-- starting, with the percentage of the weights that the most advanced has loaded ("" unknown). Writes nothing.
-- ARGV: grace us, roles
local out = {}
for i, of in ipairs(availability({unpack(ARGV, 2)}, tonumber(ARGV[1]))) do
  out[i] = {of.admits and '1' or '', of.keeps and '1' or '', of.starting, of.loaded or ''}
end
return out
