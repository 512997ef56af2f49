"""Moving tensors between workers: NIXL, and only here. Knows requests by id, to bound and free what they hold; no chunk order.

`base` is the contract and `factory` chooses. `nixl` is a worker's end: an `arena` of slots over one `memory`, served by one
`agent` that can be reached as `reach` says, and a `link` per peer that it reads from. `inline` is the twin without NIXL,
`measure` the benchmark of reads.
"""
