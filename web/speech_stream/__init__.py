"""Speech of a text that arrives while it is spoken: `WS /v1/audio/speech/stream`.

`socket` reads the client's events (`client_events`), `utterance` speaks a text clause by clause,
`growing_text` holds it, and `clause_audio` sends the audio of a clause. Knows no stage.
"""
