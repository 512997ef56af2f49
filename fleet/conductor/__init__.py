"""The conductor. `step` is pure: (state, event) -> (state, commands); `driver` is the one impure
part. Holds no tensors.
"""
