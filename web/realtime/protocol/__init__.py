"""Protocol of a voice socket: events in both directions, the settings of a session, and
`session.update`.
"""
