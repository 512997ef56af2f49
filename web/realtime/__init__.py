"""Voice sessions: `WS /v1/realtime` with OpenAI's GA events, and the console's socket over the same state machine.

From the bottom up: `client_events`, `server_events` and `settings` are the protocol, `served` what of it this server can do,
`update` applies what is valid and served of a client's settings, `refusal` closes the sockets of others;
`turns`, `playhead`, `heard` and `conversation` decide purely; `vad` and `ear` listen; `making` and `run` are one answer, made
and delivered; `replies` says which answer is due; `session` ties these together; `store` writes a session down; `hall` has all
of this gateway's; `sockets` and `routes` face the network. Knows no stage and no model: both come from the graph.
"""
