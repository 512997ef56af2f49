"""Loading of a span of a causal model's layers: only the span's weights are read, and only the
files with them are opened.
"""

import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from typing import cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from fleet.core.errors import ConfigError
from fleet.engine.torch.kv_pool import KVShape
from fleet.models.causal_lm.load import load_model, read_config, refusing
from fleet.models.causal_lm.norms import fuse_norms
from fleet.models.causal_lm.paged import LAYOUT, NAME, register
from fleet.models.causal_lm.probe import ProbeLayout
from fleet.models.causal_lm.rope import Rotaries, read_scaling
from fleet.models.causal_lm.span import SkippedLayer, SpanModel, Unloaded
from fleet.models.checkpoint import INDEX, file_of_each_weight
from fleet.spans.protocol.layers import LayerSpan
from fleet.spans.protocol.plan import ModelSizes

NUM_TRACED_ROWS = 2
_ONE_LOADS = threading.Lock()
"""Lock held while a span is loaded, since `transformers` changes the default dtype of the whole
process meanwhile.
"""


class BodyPlan:
    """Structure of a `transformers` model: where its layers are, and which parts run before and
    after them. Found by running the model without weights.

    `layers`: dotted name of the list of layers; `owner`: dotted name of the module that has the
    list. `before`, `after`: names of the owner's parts with weights that run before and after the
    layers. `kv_heads`, `head_dim`: shape of the keys and values of one position in one layer.
    """

    def __init__(self, model: PreTrainedModel, num_layers: int) -> None:
        """Run the model on the meta device and record its structure. Raises: ValueError if the
        model has no list of `num_layers` layers, or does not run them one after another.
        """
        lists = [
            name
            for name, part in model.named_modules()
            if isinstance(part, nn.ModuleList) and len(part) == num_layers
        ]
        if not lists:
            raise ValueError(f"it keeps its {num_layers} layers in no list")
        self.layers = min(lists, key=len)
        self.owner = self.layers.rpartition(".")[0]
        owner = model.get_submodule(self.owner)
        layout = ProbeLayout(torch.arange(NUM_TRACED_ROWS, device="meta"))
        order = _run_without_weights(
            model, owner, list(cast(nn.ModuleList, model.get_submodule(self.layers))), layout
        )
        ran = [name for name, _ in order]
        if [name for name in ran if isinstance(name, int)] != list(range(num_layers)):
            raise ValueError("its layers do not run one after another")
        first, last = ran.index(0), ran.index(num_layers - 1)
        self.returns_tuple = order[first][1]
        self.kv_heads, self.head_dim = layout.calls[0].num_kv_heads, layout.calls[0].q_Nhd.shape[-1]
        self.before = [str(name) for name in ran[:first] if _has_weights(owner, str(name))]
        self.after = [str(name) for name in ran[last + 1 :] if _has_weights(owner, str(name))]


def _has_weights(owner: nn.Module, name: str) -> bool:
    return any(True for _ in owner.get_submodule(name).parameters())


def _run_without_weights(
    model: PreTrainedModel, owner: nn.Module, layers: Sequence[nn.Module], layout: ProbeLayout
) -> list[tuple[str | int, bool]]:
    """Run the model's body on the meta device. Return its parts in the order in which they ran, as
    (layer number or name, True if the part returned a tuple).
    """
    order: list[tuple[str | int, bool]] = []

    def note(name: str | int) -> Callable[[nn.Module, object, object], None]:
        return lambda _module, _given, result: order.append((name, isinstance(result, tuple)))

    hooks = [layer.register_forward_hook(note(number)) for number, layer in enumerate(layers)]
    hooks += [
        part.register_forward_hook(note(name))
        for name, part in owner.named_children()
        if not isinstance(part, nn.ModuleList)
    ]
    try:
        width = cast(nn.Embedding, model.get_input_embeddings()).weight.shape[1]
        rows = torch.empty(1, NUM_TRACED_ROWS, width, device="meta", dtype=model.dtype)
        body = cast(nn.Module, getattr(model, model.base_model_prefix))
        body(
            inputs_embeds=rows,
            position_ids=layout.positions[None],
            use_cache=False,
            **{LAYOUT: layout},
        )
    finally:
        for hook in hooks:
            hook.remove()
    return order


def load_span(
    folder: Path,
    span: LayerSpan,
    dtype: torch.dtype,
    *,
    with_embedding: bool,
    with_head: bool = False,
    device: torch.device | None = None,
) -> SpanModel:
    """Load a span of the layers of a checkpoint's model. `device`: device of the weights, by
    default the CPU.

    `with_embedding`: load the embedding of token ids too, as an anchor needs. `with_head`: load the
    final norm and the output head even if the span ends before them. Raises: ConfigError as
    `load_model`, and for a model whose layers cannot be run separately.
    """
    with _ONE_LOADS:
        return _load_span(
            folder, span, dtype, with_embedding=with_embedding, with_head=with_head, device=device
        )


def _load_span(
    folder: Path,
    span: LayerSpan,
    dtype: torch.dtype,
    *,
    with_embedding: bool,
    with_head: bool,
    device: torch.device | None,
) -> SpanModel:
    kind, num_layers = _kind_and_layers(folder)
    span = span.of_model(num_layers, "spans")
    with refusing(folder, f"{kind} cannot be divided into spans"):
        config, model, plan = _without_weights(folder, num_layers)
        has_head = span.has_output or with_head
        partial = _partial_class(
            type(model), plan, span, with_embedding=with_embedding, with_head=has_head
        )
        config.tie_word_embeddings = bool(config.tie_word_embeddings) and has_head
        with torch.device("meta"):
            names = list(partial(config).state_dict())
    with _needed_files(folder, plan.layers.rpartition(".")[2], span, names) as weights:
        loaded = load_model(
            folder, kind, dtype, weights=weights, model_class=partial, config=config
        )
    if device is not None:
        with refusing(
            folder,
            f"{kind} cannot be put on {device}",
            "give the stage another device, or a smaller span",
        ):
            cast(nn.Module, loaded).to(device)
    fuse_norms(loaded)
    layers = cast(nn.ModuleList, loaded.get_submodule(plan.layers))
    shape = KVShape(
        num_layers=span.final - span.first + 1, num_kv_heads=plan.kv_heads, head_dim=plan.head_dim
    )
    return SpanModel(loaded, layers, span, shape, returns_tuple=plan.returns_tuple)


def model_sizes(
    folder: Path, dtype: torch.dtype, *, num_positions: int, buffer_bytes: int
) -> ModelSizes:
    """Return the sizes in bytes of a checkpoint's model from its configuration alone: no weight is
    read.

    `num_positions`: KV positions that each process has to hold. `buffer_bytes`: memory of each
    process beside weights and KV. Raises: ConfigError as `load_span`.
    """
    kind, num_layers = _kind_and_layers(folder)
    with refusing(folder, f"{kind} cannot be divided into spans"):
        config, model, plan = _without_weights(folder, num_layers)
        owner, embedding = model.get_submodule(plan.owner), model.get_input_embeddings()
        head = cast(nn.Module, model.get_output_embeddings())

    def bytes_of(*parts: nn.Module) -> int:
        return (
            sum(weight.numel() for part in parts for weight in part.parameters()) * dtype.itemsize
        )

    return ModelSizes(
        layers=tuple(
            bytes_of(layer) for layer in cast(nn.ModuleList, model.get_submodule(plan.layers))
        ),
        embedding=bytes_of(embedding),
        before=bytes_of(*(owner.get_submodule(name) for name in plan.before)),
        after=bytes_of(*(owner.get_submodule(name) for name in plan.after)),
        head=bytes_of(head),
        tied=bool(config.tie_word_embeddings),
        kv_bytes=2 * plan.kv_heads * plan.head_dim * num_positions * dtype.itemsize,
        buffer_bytes=buffer_bytes,
    )


def _kind_and_layers(folder: Path) -> tuple[str, int]:
    register()
    config = read_config(folder)
    return config.model_type, int(config.num_hidden_layers)


def _without_weights(
    folder: Path, num_layers: int
) -> tuple[PretrainedConfig, PreTrainedModel, BodyPlan]:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=NAME, dtype=torch.bfloat16
        )
    Rotaries(model, read_scaling(config.get_text_config()))
    return config, model, BodyPlan(model, num_layers)


def _partial_class(
    whole: type[PreTrainedModel],
    plan: BodyPlan,
    span: LayerSpan,
    *,
    with_embedding: bool,
    with_head: bool,
) -> type[PreTrainedModel]:
    """Return a subclass of the model's class whose instances have the span's weights only."""

    def construct(self: PreTrainedModel, config: PretrainedConfig) -> None:
        whole.__init__(self, config)
        _drop_weights(self, plan, span, with_embedding=with_embedding, with_head=with_head)

    contents = {
        "__init__": construct,
        "_keys_to_ignore_on_load_unexpected": [r".*"],
        "__module__": whole.__module__,
    }
    return type(whole.__name__, (whole,), contents)


def _drop_weights(
    model: PreTrainedModel,
    plan: BodyPlan,
    span: LayerSpan,
    *,
    with_embedding: bool,
    with_head: bool,
) -> None:
    layers, owner = (
        cast(nn.ModuleList, model.get_submodule(plan.layers)),
        model.get_submodule(plan.owner),
    )
    for number, layer in enumerate(layers):
        if not span.first <= number <= span.final:
            layers[number] = SkippedLayer(layer, returns_tuple=plan.returns_tuple)
    if span.first:
        for name in plan.before:
            setattr(owner, name, Unloaded())
    if not with_embedding and not (with_head and model.config.tie_word_embeddings):
        model.set_input_embeddings(Unloaded())
    if not with_head:
        for name in plan.after:
            setattr(owner, name, Unloaded())
        model.set_output_embeddings(Unloaded())


@contextmanager
def _needed_files(
    folder: Path, list_name: str, span: LayerSpan, names: Sequence[str]
) -> Iterator[Path]:
    """Context manager that yields a folder with links to the checkpoint's files that a span needs,
    and an index of only the needed weights.

    `list_name`: name of the model's list of layers. `names`: names of the span's parameters in the
    model.
    """
    file_of = file_of_each_weight(folder)
    if len(set(file_of.values())) == 1:
        yield folder
        return
    needed = _needed_weights(list(file_of), list_name, span, names)
    if not needed:
        raise ConfigError(
            f"checkpoint {folder}: has no weights of layers {span}; fetch it again",
            param="checkpoint",
        )
    with tempfile.TemporaryDirectory(prefix="fleet-span-") as path:
        linked = Path(path)
        for file in {*folder.glob("*.json"), *(file_of[weight] for weight in needed)}:
            if file.name != INDEX:
                (linked / file.name).symlink_to(file.resolve())
        (linked / INDEX).write_text(
            dumps(
                {"metadata": {}, "weight_map": {weight: file_of[weight].name for weight in needed}}
            )
        )
        yield linked


def _needed_weights(
    weights: Sequence[str], list_name: str, span: LayerSpan, names: Sequence[str]
) -> list[str]:
    """Return which of the checkpoint's `weights` a span needs. `names`: names of the span's
    parameters in the model.

    A checkpoint may nest names differently from the model, so names match if one ends with the
    other. If a parameter outside the layers matches no weight, all weights outside the layers are
    returned.
    """
    layer_in = re.compile(rf"(?:^|\.){re.escape(list_name)}\.([0-9]+)\.")
    beside = [weight for weight in weights if layer_in.search(weight) is None]
    own = [name for name in names if layer_in.search(name) is None]
    found = {
        name: [
            weight
            for weight in beside
            if f".{name}".endswith(f".{weight}") or f".{weight}".endswith(f".{name}")
        ]
        for name in own
    }
    needed = (
        set(beside)
        if not all(found.values())
        else {weight for some in found.values() for weight in some}
    )
    for weight in weights:
        layer = layer_in.search(weight)
        if layer is not None and span.first <= int(layer[1]) <= span.final:
            needed.add(weight)
    return sorted(needed)
