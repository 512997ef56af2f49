"""The optional stage that trains a draft head, and the edges of a capture.

A capture is a request for a hidden-state sample to train on instead of an answer: the main stage
computes a known prompt and a known answer (`RequestSpec.given`) in one prefill and sends the hidden
states to the trainer. The client edge of a capture is `trained`.
"""

from fleet.core.captures import INPUT_ROWS, LAST_ROWS, TAPS
from fleet.core.ids import CLIENT, PREFILL, EdgeName, StageName, Walk
from fleet.graphs.base import Edge, Stage

TRAINER = StageName("trainer")
FEATURES, TRAINED = EdgeName("features"), EdgeName("trained")
CAPTURE, TRAIN = PREFILL, Walk("train")
PUBLISH = "publish"
"""Parameter of a request for a hidden-state sample: if set, the trainer makes a version of the
draft head once it has trained on the sample, and records the parameter's value as the version's
source.
"""


def trainer_of(builder: str) -> Stage:
    """Return the declaration of the trainer stage. `builder`: "module:function" that builds it."""
    return Stage(name=TRAINER, builder=builder, walks=(TRAIN,))


def capture_edges(main: StageName) -> tuple[Edge, Edge]:
    """Return two edges: `features`, hidden states from the stage `main` to the trainer, and
    `trained`, the trainer's acknowledgement to the client.

    `features` has the token `ids` [n], the tensors of `fleet.core.captures` with n rows, the
    numbers of the layers (`layer_ids`), and the bytes of the weight hash of the model (`target`).
    `trained` has two int64 [1]: `windows`, the number of optimizer windows in the durable
    checkpoint that contains the sample, and `version`, the number of the head version made from it,
    or 0.
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
