"""Background work under rq: its queue, its worker, its kinds of job. Arguments and results are JSON; knows no request."""
