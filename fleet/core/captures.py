"""Names of the tensors of a hidden-state sample, by position.

`TAPS`: hidden states that enter the layers that a draft head reads, side by side; `LAST_ROWS`:
final hidden states; `INPUT_ROWS`: embeddings that enter the first layer, where ids do not determine
them.
"""

TAPS, LAST_ROWS, INPUT_ROWS = "taps", "last", "rows"
