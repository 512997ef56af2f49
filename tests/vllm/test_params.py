"""vLLM's sampling parameters and configuration for the roles of a split stage, as derived from
Fleet's.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from fleet.core.hand_off import VLLM_LEASE_S
from fleet.core.ids import RequestId
from fleet.core.request import Sampling
from fleet.engine.base import EngineRequest
from fleet.engine.vllm.llm import Draws
from fleet.engine.vllm.params import sampling_params
from fleet.engine.vllm.seeded_draws import END_IDS, SAMPLING
from fleet.engine.vllm.start import Half, TappedModel, VllmOptions, kv_transfer_config
from fleet.engine.vllm.tapped_rows import ROW_POSITIONS

TICKET: Mapping[str, object] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_host": "10.0.0.7",
    "remote_port": 5601,
    "remote_request_id": "r-1a2b3c4d",
    "remote_block_ids": [[1, 2]],
}
SAMPLED = Sampling(temperature=0.7, max_tokens=2048, min_tokens=9, stop=("</s>", "STOP"))


def draws(
    *,
    sampling: Sampling = SAMPLED,
    hands_off: bool = False,
    ticket: Mapping[str, object] | None = None,
    row_positions: Sequence[int] | None = None,
) -> Draws:
    """Return a request's sampling as `VllmEngine` passes it on. `hands_off`: whether for the
    prefill role, which samples one token and has no end tokens.
    """
    request = EngineRequest(request_id=RequestId("r"), sampling=sampling)
    return Draws(
        request=request,
        num_known=0,
        max_tokens=1 if hands_off else SAMPLED.max_tokens,
        end_ids=frozenset() if hands_off else frozenset({7, 3}),
        num_prompt=4,
        row_positions=row_positions,
        hands_off=hands_off,
        ticket=ticket,
    )


def test_prefill_half_asks_vllm_to_hold_its_blocks() -> None:
    params = sampling_params(draws(hands_off=True))
    assert params.max_tokens == 1
    assert params.extra_args is not None
    assert params.extra_args["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
    }


def test_prefill_half_has_no_end_conditions() -> None:
    params = sampling_params(draws(hands_off=True))
    assert (params.stop, params.stop_token_ids, params.include_stop_str_in_output) == (
        [],
        [],
        False,
    )
    assert params.min_tokens <= params.max_tokens == 1


@pytest.mark.parametrize("hands_off", [False, True])
def test_stop_strings_are_never_given_to_vllm(hands_off: bool) -> None:
    """Stop strings are never given to vLLM, since the stage's adapter detects them."""
    wanted = draws(hands_off=hands_off)
    assert sampling_params(wanted).stop == [] and wanted.request.sampling.stop == SAMPLED.stop


def test_decode_half_gives_the_ticket_unchanged() -> None:
    params = sampling_params(wanted := draws(ticket=TICKET))
    assert params.extra_args is not None
    given = params.extra_args["kv_transfer_params"]
    assert given == TICKET and given is not TICKET
    given["remote_host"] = "other"
    assert wanted.ticket == TICKET and TICKET["remote_host"] == "10.0.0.7", (
        "vLLM changes its own copy"
    )
    assert (params.max_tokens, params.min_tokens, params.stop_token_ids) == (2048, 9, [3, 7])


def test_stop_tokens_leave_the_ban_of_end_tokens_to_fleet() -> None:
    """vLLM's `min_tokens` would ban stop tokens too, for as long as end tokens are banned."""
    own = Sampling(max_tokens=20, ignore_eos=True, stop_token_ids=(5,), top_logprobs=2)
    params = sampling_params(draws(sampling=own))
    assert params.extra_args is not None and params.extra_args[END_IDS] == [3, 7]
    assert (params.min_tokens, params.stop_token_ids, params.logprobs) == (0, [3, 5, 7], 2)


def test_transfer_parameters_stand_beside_others() -> None:
    params = sampling_params(draws(hands_off=True, row_positions=[1, 2]))
    assert params.extra_args is not None
    assert params.extra_args[ROW_POSITIONS] == [1, 2]
    assert (
        params.extra_args[SAMPLING]["temperature"] == 0.7
        and "kv_transfer_params" in params.extra_args
    )


def test_unsplit_stage_has_no_transfer_parameters() -> None:
    assert "kv_transfer_params" not in (sampling_params(draws()).extra_args or {})


def options(half: Half, *, device: str = "cpu", tapped: bool = False) -> VllmOptions:
    model = TappedModel(architecture="A", media_limits={"audio": 1}) if tapped else None
    return VllmOptions(
        checkpoint=Path("none"),
        device=device,
        dtype="float32",
        kv_bytes=1 << 20,
        max_positions=64,
        block_size=16,
        max_batch=2,
        prefill_chunk_tokens=32,
        model=model,
        half=half,
    )


@pytest.mark.parametrize(("half", "role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
@pytest.mark.parametrize(("device", "buffer"), [("cpu", "cpu"), ("cuda:1", "cuda")])
def test_half_has_its_role_connector_and_buffer_device(
    half: Half, role: str, device: str, buffer: str
) -> None:
    made = kv_transfer_config(options(half, device=device))
    assert made is not None
    assert (made.kv_connector, made.kv_role, made.kv_buffer_device) == (
        "NixlConnector",
        role,
        buffer,
    )
    assert made.kv_connector_extra_config["kv_lease_duration"] == VLLM_LEASE_S
    assert made.kv_load_failure_policy == "recompute"


@pytest.mark.parametrize(("half", "role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_half_of_a_tapped_model_has_both_connectors_in_one_role(half: Half, role: str) -> None:
    made = kv_transfer_config(options(half, tapped=True))
    assert made is not None and (made.kv_connector, made.kv_role) == ("MultiConnector", role)
    inner = made.kv_connector_extra_config["connectors"]
    assert [(one["kv_connector"], one["kv_role"]) for one in inner] == [
        ("NixlConnector", role),
        ("TappedRowsConnector", role),
    ]


def test_unsplit_stage_has_no_transfer_configuration() -> None:
    assert kv_transfer_config(options("")) is None
    assert kv_transfer_config(options("", tapped=True)) is not None, (
        "rows are tapped without a split too"
    )
