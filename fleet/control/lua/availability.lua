-- availability: reads, of each role, whether it admits new requests and keeps those in flight ("1"), and how many of its workers are
-- starting. Writes nothing.
-- ARGV: grace us, roles
local any, taking = lease_deadlines()
local out = {}
for i = 2, #ARGV do
  local of = availability(ARGV[i], tonumber(ARGV[1]), any, taking)
  out[i - 1] = {of.admits and '1' or '', of.keeps and '1' or '', of.starting}
end
return out
