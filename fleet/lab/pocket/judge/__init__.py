"""Evaluation of Pocket through the API: held-out questions to a running fleet, and measurements of
its answers.

Start at `run.run`. `typed`, `speech_out`, `speech_in` and `speed` are the four parts. `listen`
measures spoken answers: `recognise` transcribes them (with the language of `bigram`, `grammar` and
`words`), `pitch` and `align` compare their pitch with the teacher's. `report` holds the results,
`show` and `plot` present them. `demo` measures nothing: it saves three answers as WAV files and as
a picture (`spectrogram`). Independent of weights and stages: any server of the API can be
evaluated.
"""
