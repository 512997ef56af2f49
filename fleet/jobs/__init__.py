"""Background jobs under rq: the worker and the kinds of job. Arguments and results are JSON; knows
no request.
"""
