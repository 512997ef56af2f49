"""Voice sessions: `WS /v1/realtime` with OpenAI's GA events, and the console's socket over the same
sessions.

`protocol` holds the events and settings, `audio` the formats, the input buffer, voice detection and
playback position, `transport` routes and sockets, `telephone` calls over Twilio, and `webrtc` those
of browsers. From the bottom up, `conversation` holds the items; `generation` runs the model;
`response_stream` delivers a response; `response_manager` begins, cancels and resumes responses;
`turn_manager` turns input audio into items; `session` owns these; `session_registry` holds the
sessions of this gateway, and `snapshot` is their stored form. `turn_log` records the turns,
`session_keeper` keeps them, and `recorded_sessions` reads them. `states` has the tables of states.
Knows no stage and no model: both come from the graph.
"""
