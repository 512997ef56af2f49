"""Limits of the gateway's connections, in bytes, time and number, as subclasses of uvicorn's
protocols.

`bounds` has the numbers, `table` the open connections and their periodic checks, `connection` one
of them. `http` and `websocket` are uvicorn's protocol classes with the limits, `message` counts
their input, `config` passes the table to them. `refusal` has the answers to requests that reach no
route, `abuse` logs these, `descriptors` limits connections by open files. Knows no route.
"""
