"""Network side of the voice sessions: routes, credentials, and WebSockets."""
