"""Deployments whose devices, dtypes and numerics contradict each other, each with its whole error
message.
"""

from tests.unit.bad_config import Case

DEVICES: tuple[Case, ...] = (
    (
        "invariant numerics in half precision",
        "numerics: invariant\ndtype: bfloat16",
        "dtype: numerics: invariant computes in float32 on cpu, not in bfloat16; set float32 or "
        "auto, or numerics: fast",
    ),
    (
        "invariant numerics on a GPU in a graph without kernels",
        "graph: cascade\nnumerics: invariant\nstages: {tts: {device: 'cuda:0'}}",
        "stages.tts.device: numerics: invariant runs tts on cpu, not on cuda:0; set cpu, or "
        "numerics: fast",
    ),
    (
        "invariant numerics on a GPU with divided layers",
        "numerics: invariant\ndevice: cuda\n"
        "stages: {thinker: {spans: {anchor: '0:1', workers: ['2:output']}}}",
        "stages.thinker.spans: layers are not divided with numerics: invariant on a GPU; remove it",
    ),
    (
        "invariant numerics on a GPU with drafts",
        "{numerics: invariant, stages: {thinker: {device: cuda, speculation: {drafter: ngram}}}}",
        "stages.thinker.speculation.drafter: drafts are not verified with numerics: invariant on a "
        "GPU; set off",
    ),
    (
        "invariant numerics on a GPU with training",
        "{numerics: invariant, device: cuda, training: {enabled: true}}",
        "training.enabled: captures are not computed with numerics: invariant on a GPU; set false",
    ),
    (
        "invariant numerics on half a stage's GPU",
        "numerics: invariant\nstages: {talker: {split: {decode: {device: cuda}}}}",
        "stages.talker.split.decode.device: numerics: invariant needs devices of one kind for "
        "talker, not cpu and cuda, which round differently; set one kind, or numerics: fast",
    ),
    (
        "invariant numerics with experts in 8 bits",
        "{numerics: invariant, device: cuda, stages: {thinker: {dtype: fp8}}}",
        "stages.thinker.dtype: numerics: invariant computes in bfloat16 or float32 on cuda, not in "
        "fp8; set bfloat16 or auto, or numerics: fast",
    ),
    (
        "experts in 8 bits in a stage without experts",
        "stages: {code2wav: {dtype: fp8}}",
        "stages.code2wav.dtype: fp8 rounds the weights of experts, which thinker and talker have; "
        "set bfloat16, or remove it",
    ),
    (
        "experts in 8 bits in a graph without experts",
        "graph: cascade\nstages: {asr: {dtype: fp8}}",
        "stages.asr.dtype: fp8 rounds the weights of experts, which no stage of graph cascade has; "
        "set bfloat16, or remove it",
    ),
    (
        "experts in 8 bits on another engine",
        "stages: {thinker: {dtype: fp8, engine: vllm}}",
        "stages.thinker.dtype: fp8 is for engine torch; remove it, and set "
        "stages.thinker.vllm.quantization",
    ),
    (
        "experts in 8 bits in a half on a CPU",
        "{device: cuda, stages: {talker: {dtype: fp8, split: {decode: {device: cpu}}}}}",
        "stages.talker.dtype: fp8 runs on a GPU, not on cpu; set bfloat16 or float32, or device: "
        "cuda",
    ),
    (
        "halves of two dtypes",
        "stages: {thinker: {split: {prefill: {device: cpu}, decode: {device: cuda}}}}",
        "stages.thinker.split: computes prefill on cpu and decode on cuda, and dtype auto is "
        "float32 on a CPU and bfloat16 on a "
        "GPU, but the halves must share one; set dtype to float32 or bfloat16, or set the same "
        "device for both",
    ),
    (
        "halves of two dtypes, one of them on the deployment's device",
        "device: 'cuda:1'\nstages: {talker: {split: {decode: {device: cpu}}}}",
        "stages.talker.split: computes prefill on cuda:1 and decode on cpu, and dtype auto is "
        "float32 on a CPU and bfloat16 on a "
        "GPU, but the halves must share one; set dtype to float32 or bfloat16, or set the same "
        "device for both",
    ),
)
