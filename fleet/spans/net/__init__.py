"""Connections between the workers of a divided model. Rows pass over them, and never through Redis.

`listener` accepts connections and `dial` opens them, both after a `handshake` that proves the
fleet's secret. `connection` is one open connection, which exchanges the `frames` of its wire format
and puts what arrives into the queue of its process. Large payloads are read from a `ring` of the
sender. Frames are neither encrypted nor signed: as for other transfers, the network must be one of
workers alone. Knows no layers, rows or requests.
"""
