"""Speech as Pocket's audio tower is taught it: many voices, spoilt in many ways, as the features that the tower reads.

`voices` lists who speaks and who never does in training, `recordings` keeps what they said on disk, `augment` puts rooms and
noise around it, `features` makes the log-mel frames. Knows no network.
"""
