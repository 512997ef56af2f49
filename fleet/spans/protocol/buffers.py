"""Upper bound of a process's memory beside weights and KV pool, by the limits of its steps. Pure.

Knows no model: callers pass the width of a hidden state.
"""

from dataclasses import dataclass

PROCESS_BYTES = {"cpu": 512 << 20, "cuda": 512 << 20}
"""Memory of a process that holds no model, by device kind.

cpu: measured with torch 2.13 (CPU) on x86-64: 429 MiB are resident after the imports of a worker
and one matrix product, and some 60 MiB more after the first steps, for models of different sizes.
cuda: an allowance for CUDA's context and the workspaces of its libraries in the GPU's memory; not
measured.
"""
ROWS_OF_PASS = 20
"""Vectors of hidden width that a process holds per row of a step while it computes one layer:
residual, norm, queries, keys, values, attention, and an MLP of up to four times the hidden width,
some of them in float32.

Measured on a CPU as the growth of resident memory during steps of 1024 to 4096 rows of hidden width
1024: 16 for an MLP of width 4096, 8 for one of 3072, 11 for 4 of 8 experts of width 768, all in
float32; 19 for the MLP of 3072 in bfloat16.
"""
COPIES_OF_LOGITS = 4
"""Copies of the float32 logits that exist while tokens are sampled."""
LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PassLimits:
    """Limits of a stage's steps, from which the size of its buffers follows.

    `max_batch`: requests per step. `prefill_chunk_tokens`: rows of one request per step.
    `num_positions`: positions in the KV pool. `window`: most steps in flight. `keep_bytes`: hidden
    states already sent that a process keeps, to send them again if the next process is replaced.
    """

    max_batch: int
    prefill_chunk_tokens: int
    num_positions: int
    window: int
    keep_bytes: int

    @property
    def max_rows(self) -> int:
        """The most rows of one step, at most the number of positions in the KV pool."""
        return min(self.max_batch * self.prefill_chunk_tokens, self.num_positions)


def buffer_bytes(
    limits: PassLimits, *, device_kind: str, row_width: int, num_ids: int, itemsize: int
) -> int:
    """Return the most memory that a process of a divided stage needs beside weights, keys and
    values.

    The result is the sum of: the process itself; the intermediate rows of one layer in the largest
    step; the logits of the largest batch; the input rows of open requests, which the anchor stores;
    and, on a CPU, the rows sent to the next process, which are kept up to `keep_bytes` and while
    their steps are in flight. `row_width`: width of a hidden state. `num_ids`: width of the logits.
    `itemsize`: bytes per number of a hidden state.
    """
    row_bytes = row_width * itemsize
    pass_bytes = ROWS_OF_PASS * limits.max_rows * row_bytes
    logits = COPIES_OF_LOGITS * LOGIT_BYTES * limits.max_batch * num_ids
    stored = limits.num_positions * row_bytes
    # Rows that were sent are in the host's memory. Each is of another position of the pool.
    sent = (
        min(stored, limits.keep_bytes + limits.window * limits.max_rows * row_bytes)
        if device_kind == "cpu"
        else 0
    )
    return PROCESS_BYTES[device_kind] + pass_bytes + logits + stored + sent
