"""Redis, and only here: the key table, the fenced scripts, and the clients that call them. Knows no tensor and no engine."""
