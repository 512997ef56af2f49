"""The run of a batch: each line is sent to a gateway as any client would send it, and its answer
is written once. Knows no queue of jobs.
"""
