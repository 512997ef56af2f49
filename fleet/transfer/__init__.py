"""Transfer of tensors between workers, by NIXL, which is used only here. Knows requests by id, to
bound and free their memory.

`base` is the interface and `factory` chooses an implementation. `nixl` is a worker's end: an
`arena` of slots over one `memory`, served by one `agent` with the network access of `reach`, and a
`peer_link` for each peer that it reads from. `closing` ends agents, and `watch` notices those that
neither progress nor end. `inline` is the implementation without NIXL, `probe`
the test of `fleet doctor`.
"""
