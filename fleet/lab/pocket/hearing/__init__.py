"""Training data of Pocket's audio tower: speech in many voices, augmented, as log-mel features.

`voices` lists the training voices and the unseen ones, `recordings` stores speech on disk,
`augment` adds rooms and noise, `features` computes the log-mel frames. Independent of the network.
"""
