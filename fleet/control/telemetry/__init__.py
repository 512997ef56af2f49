"""What people look at, read from Redis: bounded answers, no right needed, nothing on the way of a chunk."""
