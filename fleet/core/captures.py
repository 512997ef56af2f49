"""Names of the rows of a capture, by position.

`TAPS`: the rows that enter the layers that a draft head reads, side by side; `LAST_ROWS`: final
hidden rows; `INPUT_ROWS`: the rows that enter the first layer, where ids do not determine them.
"""

TAPS, LAST_ROWS, INPUT_ROWS = "taps", "last", "rows"
