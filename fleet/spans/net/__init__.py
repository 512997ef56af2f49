"""Connections between the workers of a divided model, on which hidden states travel instead of
through Redis.

`listener` accepts connections and `dial` opens them, both after a `handshake` that proves the
fleet's secret. `connection` is one open connection, which exchanges messages as `frames` and puts
arrivals into the queue of its process. Large payloads are read from a `ring` of memory in the
sender. Frames are neither encrypted nor signed: as for other transfers, the network must be one of
workers alone. Knows no layers, rows or requests.
"""
