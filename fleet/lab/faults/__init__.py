"""`fleet chaos`: faults injected into the processes of a loaded fleet, and a check that its clients
still receive every byte.

`main` is the command and `options` its options; `fleet_under_test` starts what a run needs.
`schedule`, `answer`, `recovery` and `pauses` are pure. `clients` and `load` send requests, `voice`
holds conversations, `saves` saves some as `fleet session` does, `captures` sends hidden-state
samples to the trainer, each client on a thread of `client_threads`; clients of `slow` read slowly
for a while. `faults` injects faults in processes, and `redis_faults` faults in the servers of
`redis_servers`; `watch` and `event_log` read the fleet's state. `verdict` judges a run and `report`
presents it. `soak` runs `fleet chaos --soak` with `soak_load`, `soak_samples` and `soak_report`.
Knows no model: roles come from the graph.
"""
