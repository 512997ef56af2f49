"""A wing: export of ended answers as traces to a collector of OpenTelemetry (`telemetry.otlp`).

`exporter` follows the ends of answers, `spans` converts a trace, `sender` has the connection. The
last two need the extra `otlp`, and are imported only where an endpoint is set.
"""
