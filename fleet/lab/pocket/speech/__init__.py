"""Speech data of Pocket's speech stages: frames of 80 ms, their features, their codes and the
waveform of the features.

`analysis` computes features, `wordlock` puts words on the frame grid, `shards` stores the result on
disk, `codes` quantizes a frame to eight codes, `pulses` synthesizes a waveform from features.
Independent of the network.
"""
