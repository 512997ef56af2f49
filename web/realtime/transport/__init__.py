"""The network side of voice sessions: routes, credentials, WebSockets and what is written to
them.
"""
