"""`fleet chaos`: faults injected into the processes of a loaded fleet, and a check that its clients still receive every byte.

`main` is the command; `schedule`, `answer`, `recovery` and `pauses` are pure; `clients` and `load` send requests, `faults`
injects faults, `watch` and `event_log` read the fleet's state. Knows no model: roles come from the graph.
"""
