"""Connections of the gateway: subclasses of uvicorn's protocols with limits of bytes, time and
number.

`bounds` has the numbers, `table` the open connections and their periodic checks, `connection` a
single connection. `http` and `websocket` are uvicorn's protocol classes with the limits, `message`
counts their input, `config` passes the table to them. `refusal` has the answers to requests that
reach no route, `abuse` logs refusals, `descriptors` limits connections by open files. Knows no
route.
"""
