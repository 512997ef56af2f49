"""Random weights with which the tiny checkpoint is audible and depends on every input.

The default initialisation of `transformers` gives silence (layer scales of 0.01, ConvNeXt gammas of
1e-6) and ignores its input (0.02 everywhere, so greedy decoding repeats one token). Here every
matrix is Gaussian with a standard deviation of `gain / sqrt(fan-in)`, which keeps activations near
1, and the attention is sharp enough that a change anywhere in the context changes what follows.

Channel 0 of the Thinker's and the Talker's residual stream is a constant: every embedding carries
`CONSTANT` there and no layer writes to it. That gives the bias-free output heads a bias, used to
keep answers to printable text tokens and the two end tokens rare. Knows no config files and no
tokenizers.
"""

import math
import re
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

CONSTANT = 2.0
"""Value of the constant channel, in units of the embeddings' standard deviation."""
NEVER = -30.0
"""Weight of the constant channel in the head row of a token that is never to be answered."""
Rules = Sequence[tuple[str, str, float]]
"""Rules that fill weights: (name pattern, rule, value). The first pattern found in a weight's name
decides. Rules: `fan_in` draws from a Gaussian of standard deviation value / sqrt(fan-in), `normal`
from one of standard deviation value, `around_one` from a Gaussian around 1; `constant` fills with
the value; `taps` draws a smooth upsampling, since a rough one would be heard as loud hiss.
"""

_RULES: Rules = (
    (r"[qk]_norm\.weight$", "constant", 1.6),
    (r"(layer_?norm|norm\d?|ln_q|ln_post)\.weight$", "around_one", 0.1),
    (r"layer_scale\.scale$", "constant", 0.5),
    (r"\.gamma$", "constant", 0.5),
    (r"\.(alpha|beta)$", "normal", 0.2),
    (r"^thinker.*embed_tokens\.weight$", "normal", 1.0),
    (r"^talker\.model\.codec_embedding\.weight$", "normal", 0.5),
    (r"^talker\.code_predictor.*codec_embedding\.\d+\.weight$", "normal", 0.25),
    (r"^code2wav\.code_embedding\.weight$", "normal", 4.0),
    (r"pos_embed\.weight$", "normal", 0.5),
    (r"\.bias$", "normal", 0.1),
    (r"^thinker\.lm_head\.weight$", "fan_in", 4.0),
    (r"codec_head\.weight$", "fan_in", 3.0),
    (r"code_predictor\.lm_head", "fan_in", 3.0),
    (r"mlp\.gate\.weight$", "fan_in", 2.0),
    (r"(down_proj|o_proj\.weight)", "fan_in", 1.5),
    (r"^talker\.\w+_projection", "fan_in", 1.7),
    (r"^code2wav\.pre_transformer.*[qk]_proj", "fan_in", 1.3),
    (r"^code2wav\.decoder\.6\.conv\.weight$", "fan_in", 0.28),
    (r"^code2wav\.decoder\.[34]\.block\.1\.conv", "taps", 1.0),
    (r"^code2wav\.decoder\.\d\.block\.[234]\.conv", "fan_in", 0.5),
    (r"", "fan_in", 1.0),
)

_FULL_SIZE_RULES: Rules = (
    # Over many layers, strong attention would make all rows of a context alike.
    (r"(language_model|talker\.model)\.layers.*o_proj\.weight$", "fan_in", 0.3),
    *_RULES,
)

_NESTED = {
    "thinker.audio_tower.": "thinker.model.audio_tower.",
    "thinker.visual.": "thinker.model.visual.",
    "thinker.model.": "thinker.model.language_model.",
}


@torch.no_grad()
def fill_weights(
    model: nn.Module, seed: int, *, answer_ids: Sequence[int], im_end_id: int, codec_eos_id: int
) -> None:
    """Overwrite every parameter of a `Qwen3OmniMoeForConditionalGeneration` with random values that
    depend only on its name and `seed`.

    `answer_ids`: the only text tokens to be answered; `im_end_id`, `codec_eos_id`: end tokens of
    text and speech, which become rare.
    """
    parameters = {_nested_name(name): parameter for name, parameter in model.named_parameters()}
    fill_by_rules(parameters, _RULES, seed)
    _fix_constant_channel(parameters)
    _shape_heads(parameters, answer_ids, im_end_id, codec_eos_id)


def _nested_name(name: str) -> str:
    """Return the name of a parameter in transformers 5.23, which nests the Thinker's parts; 5.19
    does not yet.
    """
    for flat, nested in _NESTED.items():
        if name.startswith(flat) and not name.startswith(tuple(_NESTED.values())):
            return nested + name.removeprefix(flat)
    return name


@torch.no_grad()
def fill_by_rules(parameters: Mapping[str, Tensor], rules: Rules, seed: int) -> None:
    for name, parameter in parameters.items():
        generator = torch.Generator(parameter.device).manual_seed(
            zlib.crc32(f"{seed}/{name}".encode())
        )
        rule, value = next(
            (rule, value) for pattern, rule, value in rules if re.search(pattern, name)
        )
        _fill(name, parameter, rule, value, generator)


def fill_full_size(name: str, weight: Tensor) -> None:
    """Overwrite one weight of the model of published size with random values, on its own device.
    Activations stay near 1 at any depth.

    The hidden states of different tokens stay different, so that they are routed to different
    experts, as in a trained model.
    """
    fill_by_rules({_nested_name(name): weight}, _FULL_SIZE_RULES, seed=0)


def _fill(
    name: str, parameter: Tensor, rule: str, value: float, generator: torch.Generator
) -> None:
    if rule == "constant":
        parameter.fill_(value)
    elif rule == "around_one":
        parameter.normal_(1.0, value, generator=generator)
    elif rule == "normal":
        parameter.normal_(0.0, value, generator=generator)
    elif rule == "taps":
        _fill_taps(parameter, value, generator)
    else:
        parameter.normal_(0.0, value / math.sqrt(_fan_in(name, parameter)), generator=generator)


def _fan_in(name: str, parameter: Tensor) -> int:
    if ".experts." in name:  # experts x out x in, or out x in of one of them
        return parameter.shape[-1]
    # transposed convolution: in x out x kernel
    if re.search(r"(upsample\.\d\.0|block\.1)\.conv\.weight$", name):
        stride = parameter.shape[2] if "upsample" in name else parameter.shape[2] // 2
        return parameter.shape[0] * parameter.shape[2] // stride
    return math.prod(parameter.shape[1:])


def _fill_taps(parameter: Tensor, gain: float, generator: torch.Generator) -> None:
    """Fill the weight of a transposed convolution, inputs x outputs x 2 strides, so that it mixes
    channels at random and interpolates linearly between positions.
    """
    num_inputs, num_outputs, num_taps = parameter.shape
    where = parameter.device
    mix = (
        torch.randn(num_inputs, num_outputs, 1, generator=generator, device=where)
        * gain
        / math.sqrt(num_inputs)
    )
    centre = (num_taps - 1) / 2
    parameter.copy_(
        mix * (1 - (torch.arange(num_taps, device=where) - centre).abs() * 2 / num_taps)
    )


def _fix_constant_channel(parameters: Mapping[str, Tensor]) -> None:
    """Make channel 0 `CONSTANT` in all that enters the Thinker and the Talker, and let no layer
    write to it.
    """
    sources = (
        "thinker.model.audio_tower.proj2",
        "thinker.model.visual.merger.mlp.2",
        "talker.text_projection.linear_fc2",
        "talker.hidden_projection.linear_fc2",
    )
    for source in sources:
        parameters[f"{source}.weight"][0] = 0.0
        parameters[f"{source}.bias"][0] = CONSTANT
    parameters["thinker.model.language_model.embed_tokens.weight"][:, 0] = CONSTANT
    for name, parameter in parameters.items():
        if re.search(r"^talker.*codec_embedding", name):
            parameter[:, 0] = 0.0
        elif re.search(r"merger_list\.\d+\.mlp\.2\.", name):
            parameter[0] = 0.0
        elif re.search(r"(language_model|talker\.model)\.layers.*(o_proj\.weight|down_proj)", name):
            parameter[..., 0, :] = 0.0


def _shape_heads(
    parameters: Mapping[str, Tensor], answer_ids: Sequence[int], im_end_id: int, codec_eos_id: int
) -> None:
    """Bias the Thinker's head to printable tokens, make both end tokens rare, and remove the DC
    offset of the sound.
    """
    head = parameters["thinker.lm_head.weight"]
    head[:, 0] = NEVER
    head[list(answer_ids), 0] = 0.0
    head[im_end_id, 0] = -2.5
    codec_head = parameters["talker.codec_head.weight"]
    codec_head[:, 0] = 0.0
    codec_head[codec_eos_id, 0] = -4.0
    # Taps that sum to zero pass no constant, so the snake activations' offset does not reach the
    # loudspeaker.
    last = parameters["code2wav.decoder.6.conv.weight"]
    last -= last.mean(dim=-1, keepdim=True)
    parameters["code2wav.decoder.6.conv.bias"].zero_()
