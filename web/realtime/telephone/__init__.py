"""Telephone calls as voice sessions: Twilio's Media Streams over a WebSocket. See
`fleet/docs/telephone.md`. Sessions know nothing of this package.
"""
