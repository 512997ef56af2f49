"""What Pocket can and cannot do, found out from outside: held-out questions to a running fleet, answers read and listened to.

Start at `run.run`. `typed`, `speech_out`, `speech_in` and `speed` are the four parts; `listen` is the ear: `recognise` writes
down what is said (`bigram`, `grammar`, `words` tell it the language), `pitch` and `align` compare melody with the teacher's.
`report` holds what was found, `show` and `plot` present it. `demo` judges nothing: three answers to hear, and to see
(`spectrogram`). Knows no weights and no stage: whatever speaks the API can be judged.
"""
