"""Files and batches of OpenAI's API: many requests in one file, answered in the background. Knows
no HTTP; `asking` sends the requests.
"""
