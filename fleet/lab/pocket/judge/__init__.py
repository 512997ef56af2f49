"""Evaluation of Pocket through the API: held-out questions to a running fleet, and measurements of
its answers.

Start at `run.run`. `typed`, `speech_out`, `speech_in` and `speed` are the four parts. `listen`
measures spoken answers: `recognise` transcribes them, with a model of `language` and the
pronunciations of `words`, and `pitch` compares their pitch with the teacher's. `report` holds the
results and presents them. `demo` measures nothing: it saves three answers as WAV files and as a
picture. Independent of weights and stages: any server of the API can be evaluated.
"""
