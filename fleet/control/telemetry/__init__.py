"""State of the fleet for console and API, read from Redis: bounded answers, no fencing, nothing on
the path of a chunk.
"""
