-- The log, the traces of requests and the time series.

local MAX_LOGS, MAX_FACTS = 20000, 10000
local MAX_NAMED_TASKS = 60
local MAX_TRACE_EVENTS = 400
local SERIES_STEP_US, SERIES_KEPT_S = 5000000, 3700
local MAX_JOURNAL, MAX_DETAIL_BYTES = 20000, 1000
-- Log to the fleet's log in the script that decides what the line says. Returns the entry's id and
-- fields.
local function log_line(level, process, worker, stage, request, message)
  local fields = {
    't', int(now_us()), 'l', level, 'n', 'fleet.control', 'p', process,
    'w', worker or '', 's', stage or '', 'r', request or '', 'm', message,
  }
  return call('XADD', PREFIX .. 'logs', 'MAXLEN', '~', MAX_LOGS, '*', unpack(fields)), fields
end
-- Log a fact of the fleet in the script that writes it: once per fact, whichever processes see it.
-- It is kept apart too, since lines that clients cause may trim it from the log; under the same id,
-- so that a reader can continue in one list where the other ends.
local function log_fact(...)
  local id, fields = log_line(...)
  local facts = PREFIX .. 'logs:facts'
  -- The id is refused if the log was deleted, and Redis's clock set back: then any id is better
  -- than none.
  for _, fact_id in ipairs({id, '*'}) do
    local added =
      redis.pcall('XADD', facts, 'MAXLEN', '~', MAX_FACTS, fact_id, unpack(fields))
    if type(added) ~= 'table' then break end
  end
end
-- Append an entry to the journal in the script that makes the change: what happened, then names and
-- values of fields of `fleet.telemetry.journal.JournalEntry`.
local function write_journal(what, ...)
  call('XADD', PREFIX .. 'journal', 'MAXLEN', '~', MAX_JOURNAL, '*',
    'at_us', int(now_us()), 'what', what, ...)
end
-- Return the tasks that a worker or gateway holds, as text, their request if all are of the same
-- one, and the tasks as request|stage.
local function held_by(worker)
  local named, only_request = {}, nil
  local held = call('SMEMBERS', tasks_of(worker))
  table.sort(held)
  for number, pair in ipairs(held) do
    local request, stage = string.match(pair, '^(.-)|(.+)$')
    if number <= MAX_NAMED_TASKS then named[number] = request .. ' (' .. stage .. ')' end
    only_request = (number == 1 or only_request == request) and request or ''
  end
  if #named == 0 then return 'nothing', '', held end
  local more = #held > #named and ' and ' .. #held - #named .. ' more' or ''
  return table.concat(named, ', ') .. more, only_request, held
end
-- Return the labels `process` and `stage` of a log line about a worker of the role; a gateway has
-- none.
local function labels_of(role)
  if role == '' then return 'web', '' end
  return 'worker', string.match(role, '^[^.]+')
end
-- Append an event to the trace of a known request. No script decides by the trace.
local function trace(request, what, stage, epoch, worker, detail)
  local key = PREFIX .. 'req:' .. request .. ':trace'
  local line = int(now_us()) .. '|' .. what .. '|' .. stage .. '|' .. (epoch or '') .. '|' ..
    (worker or '') .. '|' .. (detail or '')
  if call('RPUSH', key, line) > MAX_TRACE_EVENTS then call('LTRIM', key, -MAX_TRACE_EVENTS, -1) end
end
-- Add one to a field of the present step of the fleet's time series.
local function count(field)
  local key = PREFIX .. 'series:' .. int(math.floor(now_us() / SERIES_STEP_US))
  if call('HINCRBY', key, field, 1) == 1 then call('EXPIRE', key, SERIES_KEPT_S) end
end
-- Count a duration in its bucket, by the bounds of `fleet.telemetry.counts`.
local function count_us(field, duration_us)
  local bucket = math.ceil(20 * math.log(math.max(duration_us, 1) / 100) / math.log(10))
  count(field .. ':' .. int(math.max(0, math.min(100, bucket))))
end
