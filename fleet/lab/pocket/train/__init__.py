"""Training of Pocket: one resumable run for each part, all with the loop in `loop`."""
