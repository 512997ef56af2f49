"""Rules that relate several values of a deployment, checked before anything starts, one function
per rule. Rules about a single subject, such as devices, have modules of their own. Knows no
process.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pydantic import ValidationError

from fleet.config import values
from fleet.config.device_rules import (
    buffer_device_exists,
    device_lists_are_usable,
    fp8_is_possible,
    halves_share_a_dtype,
    invariant_numerics_are_possible,
    shares_fit_their_gpu,
)
from fleet.config.draft_rules import captures_can_be_trained_on, drafts_can_be_verified
from fleet.config.names import format_value, suggest
from fleet.config.placement import gpu_of, place_workers
from fleet.config.problems import Problem, first_problem
from fleet.config.schema import ARENA_MIB, FleetConfig, WebConfig
from fleet.config.span_rules import spans_are_complete, stages_can_be_divided
from fleet.config.stage_schema import CACHE_KEYS, KV_PAGES, SamplingDefaults, StageConfig
from fleet.config.vllm_rules import (
    tensor_parallel_stages_run_on_gpus,
    vllm_halves_share_a_kind_of_device,
    vllm_halves_use_nixl,
    vllm_settings_are_used,
)
from fleet.graphs import GRAPHS, Stage

Rule = Callable[[FleetConfig], Iterator[Problem]]
_GENERATED = ("auto", "tiny")
_FAKE_ENGINE_SETTINGS = ("step_ms",)


def find_first_problem(config: FleetConfig) -> Problem | None:
    """Return the first broken rule as a problem; None if the deployment keeps all rules. Rules run
    in a fixed order, and a rule may rely on earlier rules.
    """
    return next((problem for rule in RULES for problem in rule(config)), None)


def graph_is_known(config: FleetConfig) -> Iterator[Problem]:
    if config.graph not in GRAPHS:
        known = ", ".join(sorted(GRAPHS))
        yield Problem(
            ("graph",),
            f"unknown graph {format_value(config.graph)}; use one of "
            f"{known}{suggest(config.graph, GRAPHS)}",
        )


def stages_and_edges_exist(config: FleetConfig) -> Iterator[Problem]:
    graph = config.graph_declaration()
    yield from _unknown_names(
        "stage", config.stages, [stage.name for stage in graph.all_stages], config.graph
    )
    yield from _unknown_names(
        "edge", config.edges, [edge.name for edge in graph.edges], config.graph
    )


def _unknown_names(
    noun: str, names: Iterable[str], known: list[str], graph: str
) -> Iterator[Problem]:
    for name in names:
        if name not in known:
            message = (
                f"graph {graph} has no such {noun}; it has {', '.join(known)}{suggest(name, known)}"
            )
            yield Problem((f"{noun}s", name), message)


def ramps_are_used(config: FleetConfig) -> Iterator[Problem]:
    """Yield an error for each configured ramp without effect: the policy's kind is not `ramp`, and
    the edge's items are not decoding windows, which always follow the ramp.
    """
    for edge in config.graph_declaration().edges:
        given = config.edges[edge.name].policy if edge.name in config.edges else None
        if given and given.ramp and given.kind != "ramp" and edge.policy.kind != "ramp":
            message = f"kind {given.kind} does not use a ramp; set kind: ramp, or remove it"
            yield Problem(("edges", edge.name, "policy", "ramp"), message)


def splits_are_possible(config: FleetConfig) -> Iterator[Problem]:
    """Yield an error for each split of a stage without a separate prefill, and for worker counts on
    a split stage, where the halves have their own.

    Default worker counts are accepted, since a printed configuration names every default.
    """
    for stage in config.graph_declaration().all_stages:
        given = config.stages.get(stage.name)
        if given is None or given.split is None:
            continue
        if len(stage.walks) < 2:
            splittable = [
                each.name for each in config.graph_declaration().stages if len(each.walks) > 1
            ]
            message = (
                f"{stage.name} has no prefill to split from its decode; only "
                f"{', '.join(splittable)} can be split"
            )
            yield Problem(("stages", stage.name, "split"), message)
        if given.replicas != StageConfig().replicas:
            message = (
                "a split stage has no workers of its own; set split.prefill.replicas and "
                "split.decode.replicas instead"
            )
            yield Problem(("stages", stage.name, "replicas"), message)
        if given.standby != StageConfig().standby:
            message = (
                "a split stage has no workers of its own; set split.prefill.standby or "
                "split.decode.standby instead"
            )
            yield Problem(("stages", stage.name, "standby"), message)


def engines_serve_their_stages(config: FleetConfig) -> Iterator[Problem]:
    for stage in config.graph_declaration().stages:
        engine = config.engine_of(stage.name)
        here = ("stages", stage.name, "engine")
        if engine == "fake":
            continue
        if engine not in stage.engines:
            yield Problem(
                here, f"{engine} does not serve {stage.name}; use {' or '.join(stage.engines)}"
            )
        elif engine == "vllm" and config.numerics == "invariant":
            yield Problem(here, "vllm has no invariant numerics; use torch, or numerics: fast")


def stage_settings_are_known(config: FleetConfig) -> Iterator[Problem]:
    for stage in config.graph_declaration().stages:
        known = stage.settings + (_FAKE_ENGINE_SETTINGS if config.engine == "fake" else ())
        for name in config.stage(stage.name).extra:
            if name not in known:
                reads = f"reads {', '.join(known)}" if known else "reads no settings"
                message = (
                    f"the builder of {stage.name} {reads} with engine {config.engine}; "
                    f"remove it{suggest(name, known)}"
                )
                yield Problem(("stages", stage.name, "extra", name), message)


def stage_checkpoints_are_used(config: FleetConfig) -> Iterator[Problem]:
    """Yield an error for each checkpoint of a stage in a graph whose stages share one checkpoint,
    and for the names of generated checkpoints, which contain all stages.
    """
    has_own = config.graph_declaration().has_stage_checkpoints
    for name, stage in config.stages.items():
        here = ("stages", name, "checkpoint")
        if stage.checkpoint is not None and not has_own:
            yield Problem(
                here, f"the stages of graph {config.graph} share one checkpoint; set checkpoint"
            )
        elif stage.checkpoint in _GENERATED:
            message = (
                f"{stage.checkpoint} is a checkpoint of all stages; set it as checkpoint, or a "
                "folder or hub name here"
            )
            yield Problem(here, message)


def sampling_is_valid(config: FleetConfig) -> Iterator[Problem]:
    for stage in config.graph_declaration().all_stages:
        here, given = ("stages", stage.name, "sampling"), config.stage(stage.name).sampling
        if given and not stage.default_sampling:
            yield Problem(
                here, f"{stage.name} does not sample, so the section has no effect; remove it"
            )
            continue
        try:
            SamplingDefaults.model_validate(given)
        except ValidationError as error:
            yield first_problem(error, SamplingDefaults, here)


def cache_keys_are_used(config: FleetConfig) -> Iterator[Problem]:
    """Yield an error for each KV cache setting of a stage that has no KV cache.

    Default values are accepted, since a printed configuration names every default.
    """
    for stage in config.graph_declaration().all_stages:
        own, default = config.stage(stage.name), StageConfig()
        for key in CACHE_KEYS if not stage.default_sampling else ():
            if getattr(own, key) != getattr(default, key):
                message = f"{stage.name} has no KV cache, so the key has no effect; remove it"
                yield Problem(("stages", stage.name, key), message)


def answers_are_within_the_limits(config: FleetConfig) -> Iterator[Problem]:
    limit = config.limits.max_answer_tokens
    for stage in config.graph_declaration().stages:
        wanted = config.stage(stage.name).sampling.get("max_tokens", 0)
        if stage.main and wanted > limit:
            message = (
                f"{wanted} exceeds limits.max_answer_tokens, which is {limit}; lower it, "
                "or raise the limit"
            )
            yield Problem(("stages", stage.name, "sampling", "max_tokens"), message)


def share_weights_are_used(config: FleetConfig) -> Iterator[Problem]:
    limits = config.limits
    for name in limits.share_weights:
        try:
            values.network(name)
        except ValueError as error:
            yield Problem(("limits", "share_weights", name), str(error))
    if limits.share_weights and not limits.fair_shares:
        message = "fair_shares is false, so the weights have no effect; remove them"
        yield Problem(("limits", "share_weights"), message)


def requests_fit_the_kv_pool(config: FleetConfig) -> Iterator[Problem]:
    """Yield an error for each stage whose KV pool is too small for a single request that the limits
    admit. Workers that fill a GPU with pages check this themselves at start.
    """
    if config.engine == "fake":
        return
    for stage in config.graph_declaration().stages:
        own = config.stage(stage.name)
        kv_pages = own.kv_pages or (None if _fills_gpu(config, stage) else KV_PAGES)
        if kv_pages is None or not stage.default_sampling:
            continue
        positions = kv_pages * own.page_size_tokens
        for needed, consumer in needed_positions(config, stage):
            if needed > positions:
                pages = -(-needed // own.page_size_tokens)
                message = (
                    f"{kv_pages} pages of {own.page_size_tokens} (page_size_tokens) hold "
                    f"{positions} positions, and "
                    f"{consumer} needs {needed}; set at least {pages}, or lower that limit"
                )
                yield Problem(("stages", stage.name, "kv_pages"), message)


def _fills_gpu(config: FleetConfig, stage: Stage) -> bool:
    """Return True if workers of a stage may derive the number of KV pages from a GPU's memory, and
    then check the pool's size themselves.
    """
    devices = [placed.device for placed in place_workers(config) if placed.role.stage == stage.name]
    return config.engine_of(stage.name) == "torch" and any(
        gpu_of(config, device) for device in devices
    )


def needed_positions(config: FleetConfig, stage: Stage) -> Iterator[tuple[int, str]]:
    """Yield (positions, description) of the largest requests that the limits admit in a stage: the
    longest prompt with one answer token, and one prompt token with the longest answer.
    """
    if stage.main:
        yield (
            config.limits.max_prompt_tokens + 1,
            f"a prompt of limits.max_prompt_tokens ({config.limits.max_prompt_tokens})",
        )
    answer = config.stage(stage.name).sampling.get("max_tokens")
    if answer is not None:
        yield int(answer) + 1, f"an answer of sampling.max_tokens ({answer})"


def ports_differ(config: FleetConfig) -> Iterator[Problem]:
    if config.redis.port is not None and config.redis.port == config.web.port != 0:
        yield Problem(
            ("redis", "port"),
            f"{config.redis.port} is also web.port; choose another port for one of them",
        )


def leases_agree(config: FleetConfig) -> Iterator[Problem]:
    lease = config.lease
    if lease.no_worker_timeout_s < lease.claim_timeout_s:
        message = (
            f"{lease.no_worker_timeout_s:g} is shorter than lease.claim_timeout_s, which is "
            f"{lease.claim_timeout_s:g}: a "
            "request would fail before its task was offered again; raise it, or lower "
            "lease.claim_timeout_s"
        )
        yield Problem(("lease", "no_worker_timeout_s"), message)


def request_cap_fits_the_arena(config: FleetConfig) -> Iterator[Problem]:
    cap, arena = config.transfer.request_cap_mib, config.transfer.arena_mib or ARENA_MIB
    is_split = any(role.next for role in config.roles())
    if cap is not None and cap > arena and (config.transfer.arena_mib is not None or not is_split):
        message = (
            f"one request may hold {cap} MiB, but transfer.arena_mib is {arena}; lower "
            "it, or raise transfer.arena_mib"
        )
        yield Problem(("transfer", "request_cap_mib"), message)


def folders_are_not_files(config: FleetConfig) -> Iterator[Problem]:
    """Yield an error for each configured folder that is a file. A folder that does not exist is
    accepted: it may be created later, or be on another machine.
    """
    own = {
        ("stages", name, "checkpoint"): stage.checkpoint for name, stage in config.stages.items()
    }
    for path, checkpoint in {("checkpoint",): config.checkpoint, **own}.items():
        if checkpoint in (*_GENERATED, None):
            continue
        given = os.path.expanduser(checkpoint)
        if given.startswith("~"):
            yield Problem(
                path, f"there is no home folder {given.split('/')[0]}; write the full path"
            )
        if os.path.isfile(given):
            yield Problem(
                path, f"{given} is a file; set its folder, with config.json and the weights"
            )
    for path, folder in (
        (("data_dir",), config.data_dir),
        (("redis", "data_dir"), config.redis.data_dir),
    ):
        file = next((str(one) for one in _with_parents(folder) if os.path.isfile(one)), None)
        if file is not None:
            yield Problem(path, f"{file} is a file; set a folder")


def _with_parents(folder: Path | None) -> tuple[Path, ...]:
    return (folder, *folder.parents) if folder else ()


def tls_files_are_complete(config: FleetConfig) -> Iterator[Problem]:
    web = config.web
    for given, name, other in (
        (web.tls_cert, "tls_cert", "tls_key"),
        (web.tls_key, "tls_key", "tls_cert"),
    ):
        missing = web.tls_key if name == "tls_cert" else web.tls_cert
        if given is not None and missing is None:
            yield Problem(("web", name), f"web.{other} is missing; set both, or neither")
        if given is not None and web.tls is not None:
            yield Problem(
                ("web", "tls"),
                f"creates a certificate, and web.{name} names one; set only one of them",
            )


def aliases_differ_from_the_name(config: FleetConfig) -> Iterator[Problem]:
    """Yield an error for each model alias that equals the model's name. Default aliases are exempt,
    since a deployment may have such a name.
    """
    web = config.web
    if web.model_name in web.model_aliases and web.model_aliases != WebConfig().model_aliases:
        message = (
            f"{format_value(web.model_name)} is web.model_name, under which the model "
            "answers anyway; remove it"
        )
        yield Problem(("web", "model_aliases"), message)


RULES: tuple[Rule, ...] = (
    tls_files_are_complete,
    aliases_differ_from_the_name,
    graph_is_known,
    stages_and_edges_exist,
    ramps_are_used,
    splits_are_possible,
    engines_serve_their_stages,
    stages_can_be_divided,
    spans_are_complete,
    drafts_can_be_verified,
    captures_can_be_trained_on,
    vllm_settings_are_used,
    stage_settings_are_known,
    stage_checkpoints_are_used,
    sampling_is_valid,
    cache_keys_are_used,
    answers_are_within_the_limits,
    share_weights_are_used,
    requests_fit_the_kv_pool,
    ports_differ,
    leases_agree,
    request_cap_fits_the_arena,
    invariant_numerics_are_possible,
    fp8_is_possible,
    device_lists_are_usable,
    halves_share_a_dtype,
    tensor_parallel_stages_run_on_gpus,
    vllm_halves_use_nixl,
    vllm_halves_share_a_kind_of_device,
    shares_fit_their_gpu,
    buffer_device_exists,
    folders_are_not_files,
)
