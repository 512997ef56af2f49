-- Keys, time and messages. All keys begin with PREFIX, and all times are Redis's own, in
-- microseconds. `task` is the key of a task's hash, `request_key` the key of a request's hash;
-- `request`, `stage`, `worker` and `edge` are names.

local PREFIX = '{fleet}:'
local call = redis.call
local MAX_EVENTS = 20000
local MAX_INBOX = 200000
-- Processes that ended are kept for 14 days, with the first tasks that each held.
local GONE_S, MAX_GONE, MAX_HELD = 1209600, 1000, 100
-- For so long the end of a silent process counts against its tasks.
local EVIDENCE_S = 600
local OVERDUE_SLICE = 100
local FORGET_TRIES_US = 60000000
local SWEEP_SLICE = 50
local REFUSED_KEPT_S, MAX_REFUSED = 3600, 100
-- Return Redis's time, which stands still while a script runs.
local script_time_us = nil
local function now_us()
  if not script_time_us then
    local seconds, microseconds = unpack(call('TIME'))
    script_time_us = tonumber(seconds) * 1000000 + tonumber(microseconds)
  end
  return script_time_us
end
-- Let this script run although Redis's memory is full: Redis compares `maxmemory` only before the
-- first write of a script, and not before a deletion. To be called before any other write, by
-- scripts that free, end or keep what exists; scripts that add work are refused as a whole. The key
-- never exists.
local function pass_when_full() call('DEL', PREFIX .. 'none') end
-- Return a whole number as text.
local function int(number) return string.format('%.0f', number) end
local function task_key(request, stage) return PREFIX .. 'req:' .. request .. ':task:' .. stage end
local function edge_key(request, edge) return PREFIX .. 'req:' .. request .. ':edge:' .. edge end
local function location_key(request, edge) return PREFIX .. 'req:' .. request .. ':loc:' .. edge end
local function kv_key(request, stage) return PREFIX .. 'req:' .. request .. ':kv:' .. stage end
local function tasks_of(worker) return PREFIX .. 'worker:' .. worker .. ':tasks' end
local function publish_event(json)
  call('XADD', PREFIX .. 'events', 'MAXLEN', '~', MAX_EVENTS, '*', 'e', json)
end
local function notify(worker, ...)
  -- An unlisted worker has no inbox; a new one would be a key without an end.
  call('XADD', PREFIX .. 'inbox:' .. worker, 'NOMKSTREAM', 'MAXLEN', '~', MAX_INBOX, '*', ...)
end
-- The news of one call for the same process are one entry of its inbox, whose fields are numbered:
-- 'h' a chunk's header, 'p' a chunk to be read from its log (request|edge|index), 'l' where the
-- tensors of the chunk before are, 'a' credit (request|edge|chunks consumed). Only a header of at
-- most `MAX_NOTICE_HEADER` bytes is in the inbox too: to read a short one costs more than to write
-- it twice.
local MAX_NOTICE_HEADER = 256
local MAX_NEWS = 400
local news = {}
local function send_news()
  for worker, fields in pairs(news) do
    notify(worker, 'k', 'n', unpack(fields))
  end
  news = {}
end
local function add_news(worker, kind, value)
  if news[worker] and #news[worker] > MAX_NEWS and kind ~= 'l' then send_news() end
  local fields = news[worker] or {}
  local num_fields = #fields
  news[worker] = fields
  fields[num_fields + 1] = kind .. num_fields
  fields[num_fields + 2] = value
end
local function split(text)
  local words = {}
  for word in string.gmatch(text or '', '[^,]+') do
    words[#words + 1] = word
  end
  return words
end
