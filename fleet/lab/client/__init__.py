"""Client of the gateway's API: chat with audio, speech, transcription, request traces, workers,
voice sessions.

`client.ApiClient` is the entry. Example:

    api = ApiClient("http://localhost:8000") print(api.chat(ChatCall(model=api.model(),
    messages=(ChatMessage(role="user", content="hello"),))).text)

Blocking: a thread per request costs a measured machine less than an event loop, and raw bytes are
timed before they are decoded. The client stands on `http.client`, because httpx closes a connection
whose read timed out, which a gateway takes for a client that left. Knows no stage.
"""
