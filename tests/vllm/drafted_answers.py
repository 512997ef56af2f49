"""Answers of vLLM with a draft head, on a CPU. Run as a module: reads a `DraftedWork` from stdin,
and prints `DraftedAnswers`.

Arguments: the folders of the checkpoint and of the head. A process can have only one vLLM engine,
so this is not a test module.
"""

import os
import sys
from pathlib import Path

import msgspec


class DraftedWork(msgspec.Struct, frozen=True, kw_only=True):
    """Work for the module: prompts to answer greedily with at most `num_tokens` tokens each, and
    the number of draft tokens per step.

    `end_id`: token that ends an answer. With `ignore_eos`, vLLM would sample it and continue, while
    Fleet and `transformers` never sample it.
    """

    prompts: list[list[int]]
    num_tokens: int
    end_id: int
    num_drafts: int


class DraftedAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the module. `tokens`: tokens of each answer. `shares`: share of steps in which the
    draft token was accepted, by its position in the draft.
    """

    tokens: list[list[int]]
    shares: list[float]


def answer(checkpoint: Path, head: Path, work: DraftedWork) -> DraftedAnswers:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM, SamplingParams
    from vllm.v1.metrics.reader import Counter, Vector

    llm = LLM(
        model=str(checkpoint),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
        block_size=32,
        disable_log_stats=False,
        speculative_config={
            "method": "eagle3",
            "model": str(head),
            "num_speculative_tokens": work.num_drafts,
        },
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=work.num_tokens, stop_token_ids=[work.end_id], detokenize=False
    )
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in work.prompts], sampling, use_tqdm=False
    )
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    num_passes = metrics["vllm:spec_decode_num_drafts"]
    accepted = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert isinstance(num_passes, Counter) and isinstance(accepted, Vector)
    return DraftedAnswers(
        tokens=[list(output.outputs[0].token_ids) for output in outputs],
        shares=[count / num_passes.value for count in accepted.values],
    )


def main(checkpoint: Path, head: Path) -> None:
    work = msgspec.json.decode(sys.stdin.buffer.read(), type=DraftedWork)
    print(msgspec.json.encode(answer(checkpoint, head, work)).decode(), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
