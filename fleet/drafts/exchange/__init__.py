"""Distribution of draft head versions, from the trainer to the workers that draft with them."""
