-- forget_response: deletes the record of a response, if `owner` is its owner.
-- ARGV: response, owner
local response, owner = unpack(ARGV)
pass_when_full()
if call('HGET', PREFIX .. 'response:' .. response, 'owner') ~= owner then return 'unknown' end
drop_response(response)
return 'ok'
