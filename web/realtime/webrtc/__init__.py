"""Calls: voice sessions over WebRTC, `POST /v1/realtime/calls`.

A call uses the same session as a WebSocket. `call` is its connection: events over the data channel
by `writer`, and audio as Opus in both directions, which `speech_out` plays and `speech_in` reads.
`offer` reads and writes the session descriptions, `routes` has the two routes, and imports the rest
when it is first needed, since `aiortc` is an optional package (the extra `webrtc`).
"""
