"""Fleet serves composite speech models with a fleet of ordinary processes. The map is
fleet/README.md.
"""
