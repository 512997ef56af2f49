"""vLLM's own `LLM.generate` in this process, with the settings of a Fleet stage. Prompts and
answers are token ids.
"""

import os
from collections.abc import Callable, Sequence

from fleet.core.request import RequestSpec
from fleet.stages.options import BuildOptions


def make_generate(options: BuildOptions) -> Callable[[Sequence[RequestSpec]], list[list[int]]]:
    """Load the model into vLLM, and return a function that computes the answers to a list of
    requests together. Sets environment variables of vLLM in this process.
    """
    # one process, as the torch engine is; vLLM has no other switch
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(options.checkpoint),
        skip_tokenizer_init=True,
        dtype=options.dtype,
        enforce_eager=options.device == "cpu",
        kv_cache_memory_bytes=options.own.vllm.kv_mib << 20,
        max_model_len=options.kv_pages * options.own.page_size_tokens,
        max_num_seqs=options.own.max_batch,
        max_num_batched_tokens=options.prefill_chunk_tokens,
        block_size=options.own.page_size_tokens,
    )

    def generate(specs: Sequence[RequestSpec]) -> list[list[int]]:
        prompts = [{"prompt_token_ids": list(spec.prompt_ids)} for spec in specs]
        params = [
            SamplingParams(
                temperature=sampling.temperature,
                max_tokens=sampling.max_tokens,
                ignore_eos=sampling.ignore_eos,
                detokenize=False,
            )
            for spec in specs
            for sampling in spec.sampling.values()
        ]
        return [
            list(output.outputs[0].token_ids)
            for output in llm.generate(prompts, params, use_tqdm=False)
        ]

    return generate
