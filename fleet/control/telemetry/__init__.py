"""State of the fleet for the console and the API, read from Redis: bounded answers, no fencing,
nothing on the path of a chunk.
"""
