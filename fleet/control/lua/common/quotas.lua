-- The limits of API keys: what a key uses now, and what it has used today.

local DAY_S = 86400
local function day_of(us) return math.floor(us / 1000000 / DAY_S) end
-- Add to the audio that a key has used today, in milliseconds.
local function count_audio(key, ms)
  if key == '' or ms < 1 then return end
  local used = PREFIX .. 'key_audio:' .. int(day_of(now_us()))
  call('HINCRBY', used, key, int(math.floor(ms)))
  call('EXPIRE', used, 2 * DAY_S)
end
-- Add to the number of a key's live requests.
local function count_live_of_key(key, change)
  if key == '' then return end
  local live = PREFIX .. 'live:keys'
  if call('HINCRBY', live, key, change) <= 0 then call('HDEL', live, key) end
end
-- Return the answer for a key that has used its audio of this day, nil for others: the limit, and
-- the seconds until it may go on. `bound`: seconds a day, "" for no limit.
local function audio_refusal(key, bound)
  if bound == '' then return nil end
  local now = now_us()
  local used = call('HGET', PREFIX .. 'key_audio:' .. int(day_of(now)), key) or '0'
  if tonumber(used) < tonumber(bound) * 1000 then return nil end
  local left_s = (day_of(now) + 1) * DAY_S - now / 1000000
  return {'key_limit', 'audio_s_per_day', int(math.ceil(left_s))}
end
-- Return the answer for a request of a key at one of its limits, nil for others. `bound`: live
-- requests, "" for no limit.
local function key_refusal(key, bound, audio_bound)
  local live = tonumber(call('HGET', PREFIX .. 'live:keys', key) or '0')
  if bound ~= '' and live >= tonumber(bound) then return {'key_limit', 'max_requests', 1} end
  return audio_refusal(key, audio_bound)
end
-- Count the audio of a request that ends: that of its prompt, and the samples of its answer.
local function count_audio_of(request, key, stages, audio_edges)
  local prompt_ms, rate_hz = unpack(
    call('HMGET', PREFIX .. 'req:' .. request, 'prompt_ms', 'rate_hz'))
  local samples = 0
  for _, stage in ipairs(split(stages)) do
    for _, edge in ipairs(split(audio_edges)) do
      local written = call('HGET', task_key(request, stage), 'written:' .. edge) or ''
      samples = samples + (tonumber(string.match(written, '^%d+|%d+|(%d+)|')) or 0)
    end
  end
  local answer_ms = tonumber(rate_hz) > 0 and samples * 1000 / tonumber(rate_hz) or 0
  count_audio(key, tonumber(prompt_ms) + answer_ms)
end
