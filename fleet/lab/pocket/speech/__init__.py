"""Speech data for Pocket's speech stages: features of frames of 80 ms, their codes, and the
waveform synthesized from features.

`analysis` computes features, `wordlock` puts words on the frame grid, `shards` stores the result on
disk, `codes` quantizes a frame to eight codes, `pulses` synthesizes a waveform from features.
Independent of the network.
"""
