"""The conductor. `states` declares the state machines of requests and tasks, which the scripts in
Redis enforce. `driver` is the process that decides what is a matter of time: lapsed leases, overdue
grants, deserted roles, absent gateways and the end of retention. This process holds no state of
requests.
"""
