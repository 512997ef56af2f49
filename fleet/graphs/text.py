"""The graph of any causal language model: one stage, and one edge to the client."""

from fleet.core.ids import CLIENT, DECODE, PREFILL, EdgeName, StageName
from fleet.graphs.base import ANSWER_TENSORS, TOKENS, Edge, Graph, Stage
from fleet.graphs.training import capture_edges, trainer_of

LM = StageName("lm")


def language_model(builder: str, checkpoint_folder: str = "") -> Stage:
    """Return the stage of a causal language model. `checkpoint_folder`: see `Stage`."""
    return Stage(
        name=LM,
        builder=builder,
        span_builder="fleet.stages.text:build_span",
        layer_counter="fleet.stages.text:count_layers",
        walks=(PREFILL, DECODE),
        main=True,
        verifies_drafts=True,
        settings=("precision",),
        engines=("torch", "vllm"),
        default_sampling={"temperature": 0.0, "max_tokens": 1024},
        checkpoint_folder=checkpoint_folder,
    )


TEXT = Graph(
    name="text",
    frontend="fleet.processing.text:TextFrontend",
    tiny="fleet.models.causal_lm.tiny:write_tiny_checkpoint",
    media={EdgeName("text"): "text"},
    stages=(language_model("fleet.stages.text:build"),),
    edges=(
        Edge(
            name=EdgeName("text"),
            source=LM,
            target=CLIENT,
            tensors=ANSWER_TENSORS,
            policy=TOKENS,
        ),
        *capture_edges(LM),
    ),
    optional_stages=(trainer_of("fleet.stages.text_trainer:build"),),
)
