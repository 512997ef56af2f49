"""Background jobs under rq: the worker process and the kinds of job. Arguments and results are
JSON; knows no request.
"""
