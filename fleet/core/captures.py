"""Names of the tensors of a hidden-state sample, one row per position of the text.

`TAPS`: hidden states at the inputs of the layers that a draft head reads, concatenated.
`LAST_ROWS`: final hidden states. `INPUT_ROWS`: input embeddings of the first layer, present where
token ids alone do not determine them.
"""

TAPS, LAST_ROWS, INPUT_ROWS = "taps", "last", "rows"
