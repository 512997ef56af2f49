"""The console's pages: what each shows, read from the fleet into a typed context and rendered on the server.

A page is a function from a query to a frozen context, and a template whose blocks are sent again when they change.
Knows no Redis and no model; buttons call the public API.
"""
