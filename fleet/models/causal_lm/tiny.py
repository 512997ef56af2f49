"""A small random causal language model (Qwen3, dense) with tokenizer and chat template, for tests
and for trying Fleet.

Its answers are noise, but varied, and depend on every token of the prompt.
"""

from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from fleet.models.qwen3_omni.tiny_tokenizer import build_tokenizer, speakable_ids, write_tokenizer
from fleet.models.qwen3_omni.tiny_weights import CONSTANT, NEVER, Rules, fill_by_rules

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
_RARE = -3.0
_RULES: Rules = (
    (r"[qk]_norm\.weight$", "constant", 1.6),
    (r"norm\.weight$", "around_one", 0.1),
    (r"embed_tokens", "normal", 1.0),
    (r"^lm_head", "fan_in", 4.0),
    (r"", "fan_in", 1.3),
)


def write_tiny_checkpoint(out_dir: Path, seed: int = 0, *, num_layers: int = 3) -> Path:
    """Write the checkpoint into `out_dir` (created if absent) and return the folder; equal seeds
    give equal bytes.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    ids = tokenizer.get_vocab()
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # a size that vLLM has CPU attention for
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        eos_token_id=ids["<|im_end|>"],
        pad_token_id=ids["<|endoftext|>"],
    )
    model = Qwen3ForCausalLM(config)
    fill_by_rules(dict(model.named_parameters()), _RULES, seed)
    _shape_head(model, speakable_ids(tokenizer), ids["<|im_end|>"])
    model.generation_config.eos_token_id = ids["<|im_end|>"]
    model.save_pretrained(out_dir)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 32768,
    }
    write_tokenizer(tokenizer, out_dir, tokenizer_config)
    (out_dir / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return out_dir


@torch.no_grad()
def _shape_head(model: Qwen3ForCausalLM, answer_ids: list[int], end_id: int) -> None:
    """Make the model answer with `answer_ids` only, and rarely with the end token. Sets the output
    head's weights of channel 0, which acts as a bias, since it is constant in every embedding and
    no layer writes to it.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter[0] = 0.0
    model.model.embed_tokens.weight[:, 0] = CONSTANT
    head: Tensor = model.lm_head.weight
    head[:, 0] = NEVER
    head[answer_ids, 0] = 0.0
    head[end_id, 0] = _RARE
