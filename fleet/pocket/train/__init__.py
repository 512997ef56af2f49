"""How Pocket is made: one resumable run for each part, all by the loop in `loop`."""
