"""Speech as Pocket's speech stages see it: frames of 80 ms, their features, their codes and the waveform they stand for.

`analysis` takes speech apart, `wordlock` puts words on the frame grid, `shards` keeps the result on disk, `codes` makes eight
numbers of a frame, `pulses` makes sound of the features again. Knows no network.
"""
