"""The console: its pages, and their templates, scripts and styles.

A page reads the fleet into a frozen context; its template is rendered on the server, and its blocks
are sent again when they change. Buttons call the public API. Knows neither Redis nor the model.
"""
