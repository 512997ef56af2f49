"""The gateway: the OpenAI API, the console and metrics over a `FleetClient`.

Knows no model: it reads the graph declaration.
"""
