"""Bounds of the gateway's connections, in bytes, in time and in number, as subclasses of uvicorn's protocols.

`bounds` has the numbers and `table` the open connections: which is closed to make room, and a periodic look at each.
`connection` is one of them. `http` and `websocket` are uvicorn's protocol classes with the bounds, `message` counts what they
read, `config` carries the table to them. `refusal` answers requests that reach no route, `abuse` logs them, `descriptors` bounds
connections by open files. Knows no route.
"""
