"""OpenAI's Responses API: an answer in text to a message or a conversation, which is stored so that
a later response can continue from it.

`endpoint` answers, `events` writes the stream, `conversation` reads and stores, `stored_routes` has
the routes of stored responses.
"""
