"""The optional stage that trains a draft head, and the edges of a capture: a request whose answer
is trained on, not sent.

A capture is a request for the edge `trained`. Its prompt and its answer (`RequestSpec.given`) are
computed like a prompt.
"""

from fleet.core.captures import INPUT_ROWS, LAST_ROWS, TAPS
from fleet.core.ids import CLIENT, EdgeName, StageName, Walk
from fleet.graphs.base import Edge, Stage

TRAINER = StageName("trainer")
FEATURES, TRAINED = EdgeName("features"), EdgeName("trained")
CAPTURE, TRAIN = Walk("prefill"), Walk("train")
PUBLISH = "publish"
"""Parameter of a capture: the source of a version of the draft head, to be made once the sample is
trained on.
"""


def trainer_of(builder: str) -> Stage:
    """Return the declaration of the trainer. `builder`: "module:function"."""
    return Stage(name=TRAINER, builder=builder, walks=(TRAIN,))


def capture_edges(main: StageName) -> tuple[Edge, Edge]:
    """Return the edge of hidden states from a graph's main stage to the trainer, and the edge of
    the trainer's acknowledgement.

    `ids` [n], and the rows of `fleet.core.captures`. `layer_ids` and `target` (the bytes of a hash)
    say where the rows come from. An acknowledgement has the number of optimizer windows in the
    durable checkpoint that contains the sample, and the number of the version that was made of it,
    or 0: int64 [1] each.
    """
    features = Edge(
        name=FEATURES,
        source=main,
        target=TRAINER,
        credits=16,
        remote=(TAPS, LAST_ROWS, INPUT_ROWS),
        never_inline=True,
        tensors={
            "ids": "int32",
            TAPS: "float32",
            LAST_ROWS: "float32",
            INPUT_ROWS: "float32",
            "layer_ids": "int32",
            "target": "uint8",
        },
    )
    return features, Edge(
        name=TRAINED,
        source=TRAINER,
        target=CLIENT,
        tensors={"windows": "int64", "version": "int64"},
    )
