"""Qwen3-Omni: Thinker -> Talker -> Code2Wav, as a graph. Source: `transformers`
modeling_qwen3_omni_moe.py, `generate()`.
"""

from fleet.core.ids import CLIENT, DECODE, PREFILL, EdgeName, StageName, Walk
from fleet.graphs.base import ANSWER_TENSORS, TOKENS, ChunkPolicy, Edge, Graph, Stage, Transition
from fleet.graphs.training import capture_edges, trainer_of

THINKER, TALKER, CODE2WAV = StageName("thinker"), StageName("talker"), StageName("code2wav")
LAST_PREFILL = Walk("last_prefill")

QWEN3_OMNI = Graph(
    name="qwen3_omni",
    frontend="fleet.processing.qwen3_omni:OmniFrontend",
    tiny="fleet.models.qwen3_omni.tiny:write_tiny_checkpoint",
    shipped="fleet:checkpoints/pocket",
    baseline="fleet.models.qwen3_omni.baseline",
    full_size="fleet.stages.qwen3_omni.full_size:build",
    media={EdgeName("text"): "text", EdgeName("audio"): "audio"},
    stages=(
        Stage(
            name=THINKER,
            builder="fleet.stages.qwen3_omni.thinker:build",
            span_builder="fleet.stages.qwen3_omni.thinker:build_span",
            layer_counter="fleet.stages.qwen3_omni.thinker:count_layers",
            walks=(PREFILL, DECODE),
            main=True,
            reads_prompt_audio=True,
            verifies_drafts=True,
            has_experts=True,
            invariant_on=("cpu", "cuda"),
            engines=("torch", "vllm"),
            default_sampling={"temperature": 0.0, "max_tokens": 1024},
        ),
        Stage(
            name=TALKER,
            builder="fleet.stages.qwen3_omni.talker:build",
            span_builder="fleet.stages.qwen3_omni.talker:build_span",
            layer_counter="fleet.stages.qwen3_omni.talker:count_layers",
            span_head=False,  # its code predictor needs the last hidden row
            walks=(PREFILL, LAST_PREFILL, DECODE),
            has_experts=True,
            invariant_on=("cpu", "cuda"),
            default_sampling={
                "temperature": 0.9,
                "top_k": 50,
                "repetition_penalty": 1.05,
                "max_tokens": 4096,
            },
        ),
        Stage(
            name=CODE2WAV,
            builder="fleet.stages.qwen3_omni.code2wav:build",
            walks=(DECODE,),
            invariant_on=("cpu", "cuda"),
            gives_way=True,  # the client's buffer bridges what delays a window
            settings=("left_context",),
        ),
    ),
    edges=(
        # Answer token ids, the end token included; the gateway turns them into text.
        Edge(
            name=EdgeName("text"),
            source=THINKER,
            target=CLIENT,
            tensors=ANSWER_TENSORS,
            policy=TOKENS,
        ),
        # Per prompt chunk its positions' ids and the accept-layer rows of multimodal positions;
        # then one id per answer token.
        Edge(
            name=EdgeName("thought"),
            source=THINKER,
            target=TALKER,
            tensors={"ids": "int32", "rows": "float32", "row_positions": "int32"},
            remote=("rows",),
            credits=1024,  # as many as a usual answer has tokens: text does not wait for its speech
            transitions=(
                Transition(producer_walk=PREFILL, nth=0, to=PREFILL),
                Transition(producer_walk=DECODE, nth=0, to=LAST_PREFILL),
                Transition(producer_walk=DECODE, nth=1, to=DECODE),
            ),
        ),
        # Codes of codec frames: int32 [frames, codebooks].
        Edge(
            name=EdgeName("codes"),
            source=TALKER,
            target=CODE2WAV,
            tensors={"codes": "int32"},
            policy=ChunkPolicy(
                kind="ramp", ramp=(2, 4, 8, 16, 25), low_buffer_s=0.3, busy_first_chunk_factor=3
            ),
            item_ms=80,
            credits=64,
        ),
        # PCM16 mono samples at 24 kHz.
        Edge(
            name=EdgeName("audio"),
            source=CODE2WAV,
            target=CLIENT,
            tensors={"pcm": "int16"},
        ),
        *capture_edges(THINKER),
    ),
    optional_stages=(trainer_of("fleet.stages.qwen3_omni.trainer:build"),),
)
