"""The conductor, the process that decides about requests and tasks. `step` is pure: (state, event)
-> (state, commands); `driver` has all I/O. Holds no tensors.
"""
