"""`fleet chaos`: faults injected into the processes of a loaded fleet, and a check that its clients
still receive every byte.

`main` is the command; `schedule`, `answer`, `recovery` and `pauses` are pure; `clients` and `load`
send requests, `voice` holds conversations, `saves` saves some as `fleet session` does, `faults`
injects faults in processes and `redis_faults` those in the servers of `redis_servers`; `watch` and
`event_log` read the fleet's state. `soak` is another command, with modules of its own. Knows no
model: roles come from the graph.
"""
