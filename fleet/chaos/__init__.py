"""`fleet chaos`: signals to the processes of a fleet that is at work, and whether its listeners are told every byte all the same.

`main` is the command; `schedule` and `answer` are pure; `load` listens, `blows` strikes, `watch` reads what the fleet says of
itself. Knows no model: roles come from the graph.
"""
