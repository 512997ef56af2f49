"""From an answer's text to spoken words: clauses of a growing text, and how a person says them."""
