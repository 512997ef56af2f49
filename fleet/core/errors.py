"""Tree of errors. The fields of an error drive its handling; how an error is shown is decided
elsewhere.
"""

from typing import ClassVar

SHOWN_CHARS = 64


def quoted(name: str) -> str:
    """Return a client's name for something, quoted and cut to `SHOWN_CHARS`, for an error."""
    return repr(name[:SHOWN_CHARS])


class FleetError(Exception):
    """Base of all errors of Fleet.

    `code` is stable and machine-readable. `retryable`: the same call may succeed after
    `retry_after_s`. `param` is the field of the user's input that is at fault, if any.
    """

    code: ClassVar[str] = "server_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class BadInput(FleetError):
    """The user's input is at fault; the message names the field and the fix."""

    code = "invalid_value"


class InputTooLarge(BadInput):
    """A body, prompt or audio clip exceeds a configured limit."""

    code = "input_too_large"


class ContextLengthExceeded(InputTooLarge):
    """A prompt has more tokens than the model or this deployment accepts. Clients match this code
    and this wording.
    """

    code = "context_length_exceeded"

    @staticmethod
    def of(where: str, limit: int, however: str) -> "ContextLengthExceeded":
        """Build the error. `where`: name of the input field. `limit`: accepted number of tokens.
        `however`: the clause of the message about the actual length.
        """
        return ContextLengthExceeded(
            f"{where}: This model's maximum context length is {limit} tokens. However, {however}. "
            f"Please reduce the length of the {where}.",
            param=where,
        )


class UnsupportedValue(BadInput):
    """A parameter value of OpenAI's API or a compatible API that this server does not support."""

    code = "unsupported_value"


class ModelNotFound(BadInput):
    code = "model_not_found"


class NotFound(BadInput):
    """No object has the requested name, or it is no longer retained."""

    code = "not_found"


class Conflict(BadInput):
    """The object exists, but its state does not permit the operation."""

    code = "conflict"


class SecretInUse(BadInput):
    """A short-lived client secret already has its maximum number of voice sessions open."""

    code = "secret_in_use"


class ConfigError(FleetError):
    """The configuration is at fault; `param` is its dotted key."""

    code = "bad_config"


class NoSafeWeights(ConfigError):
    """A checkpoint has no weights as safetensors. Other weight files are pickles, and reading a
    pickle can run code.
    """

    @staticmethod
    def of(folder: object, wanted: str, field: str = "checkpoint") -> "NoSafeWeights":
        pickled = (
            "pickled weights (pytorch_model.bin and the like) are not read, since that can run code"
        )
        fix = "fetch or convert them as safetensors"
        return NoSafeWeights(
            f"{field}: {folder} has no weights ({wanted}); {pickled}: {fix}", param=field
        )


class Overloaded(FleetError):
    """A limit on requests, voice sessions or queued work is reached; a retry may succeed later."""

    code = "rate_limit_exceeded"
    retryable = True


class KeyAtLimit(Overloaded):
    """The API key has reached one of its limits, which `param` names."""


class VersionSkew(ConfigError):
    """A worker does not fit the registered workers: its version, checkpoint, readable tensors or
    secret differs.
    """


class NoWorker(FleetError):
    """A role that the request needs has no live worker, and none is expected."""

    code = "overloaded"
    retryable = True


class WorkerLost(FleetError):
    """Several workers died over the request, the last while it ran no other task; the request is a
    dead letter.
    """

    code = "worker_lost"
    retryable = True


class Aborted(FleetError):
    """The request was aborted, by the API or because its client's gateway is gone."""

    code = "aborted"


class GatewayStopping(FleetError):
    """The gateway stops before the answer ends. Any other gateway continues the answer from the
    last event id.
    """

    code = "gateway_stopping"
    retryable = True


class ResumedElsewhere(FleetError):
    """A newer connection, at this gateway or another, continues the answer; the old connection
    ends.
    """

    code = "resumed_elsewhere"

    @staticmethod
    def of(request: str) -> "ResumedElsewhere":
        return ResumedElsewhere(
            f"a newer connection reads the answer of {request} (it was resumed); this one ends"
        )


class RedisUnreachable(FleetError):
    code = "redis_unreachable"
    retryable = True


class AlreadySubmitted(RedisUnreachable):
    """A request with this id was submitted before; the client should read its answer instead."""


class NotReplicated(RedisUnreachable):
    """Too few replicas of Redis have received a new request, and a failover could lose it. The
    request has been aborted.
    """

    @staticmethod
    def of(num_synced: int, num_needed: int, timeout_ms: int) -> "NotReplicated":
        return NotReplicated(
            f"{num_synced} replicas of Redis had the request within redis.wait_timeout_ms "
            f"({timeout_ms}), and "
            f"redis.wait_replicas is {num_needed}, so it was aborted. Start the replicas and "
            "check their links (`fleet doctor`), "
            "or lower the setting; then try again",
            retry_after_s=5,
        )


class ChunkOrderError(FleetError):
    """A chunk was appended or released out of order; a bug in Fleet."""

    code = "chunk_order"


class TransitionError(FleetError):
    """The state machine has no row for (state, event); a bug in Fleet."""

    code = "bad_transition"


class TransferError(FleetError):
    """Tensors could not be pulled from another process's memory (deadline, checksum or generation).
    The missing tensors are recomputed.
    """

    code = "transfer_failed"
    retryable = True


class TransferStopped(FleetError):
    """Transfers of this process neither progress nor can be closed. Its worker leaves, and its
    keeper starts it again.
    """

    code = "transfer_stopped"


class ArenaFull(TransferError):
    """The arena has no room at present for a tensor that it can hold."""

    code = "arena_full"


class SpanUnreachable(FleetError):
    """Two workers that have layers of one model cannot connect: no listener answers, or a worker
    does not have the fleet's secret.
    """

    code = "span_unreachable"
    retryable = True


class SessionInterrupted(FleetError):
    """The KV cache of a conversation was not copied: a worker was lost meanwhile or does not
    answer, or the cache was dropped.
    """

    code = "session_interrupted"
    retryable = True


class EngineError(FleetError):
    """The engine failed one request; the rest of its batch continues."""

    code = "engine_error"


class SampleRefused(FleetError):
    """A sample of training does not fit the draft head or its target model, or has values that are
    not finite; the sample is dropped.
    """

    code = "sample_refused"


class SpanPrefixMismatch(EngineError):
    """A span worker lacks the keys and values of positions before the first position it was to
    compute. The missing positions are computed again.
    """

    code = "span_prefix_mismatch"
    retryable = True


class EngineStopped(FleetError):
    """The engine can compute nothing more, through no fault of a request. Its worker ends, and
    other workers continue its tasks.
    """

    code = "engine_stopped"


class OutOfPages(EngineError):
    """The request needs more pages than the whole KV pool has."""

    code = "context_length_exceeded"


class OutOfMemory(EngineError):
    """Work for one request ran out of memory; a retry may succeed when fewer requests are
    running.
    """

    code = "out_of_memory"
    retryable = True


class UnknownWireVersion(FleetError):
    """A message was written by another version of the protocol."""

    code = "wire_version"


BY_CODE: dict[str, type[FleetError]] = {}


def _index(cls: type[FleetError]) -> None:
    BY_CODE[cls.code] = cls
    for sub in cls.__subclasses__():
        _index(sub)


_index(FleetError)


NO_MEMORY = ("out of memory", "allocate memory")
"""Phrases of torch's RuntimeError: the first for a GPU, the second for a CPU."""


def failure_of(doing: str, error: Exception) -> FleetError:
    """Return the error with which to fail a request when work for that request raised `error`.
    `doing`: name of the work, for the message.
    """
    if isinstance(error, FleetError):
        return error
    reason = str(error) or type(error).__name__
    if isinstance(error, MemoryError) or any(phrase in reason for phrase in NO_MEMORY):
        return OutOfMemory(
            f"{doing}: out of memory ({reason}); shorten the prompt or lower max_tokens, or "
            "lower the stage's "
            "stages.NAME.prefill_chunk_tokens or stages.NAME.max_batch"
        )
    return EngineError(f"{doing}: {reason}")


def from_code(code: str, message: str, param: str | None = None) -> FleetError:
    """Rebuild an error that was received from another process. An unknown code becomes a plain
    FleetError.
    """
    return BY_CODE.get(code, FleetError)(message, param=param)
