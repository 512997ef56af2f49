"""One tree of errors. Each carries what drives its handling; none knows how it is shown."""

from typing import ClassVar

SHOWN_CHARS = 64


def quoted(name: str) -> str:
    """Return a name that a client sent as errors show it: in quotes, and cut to `SHOWN_CHARS`."""
    return repr(name[:SHOWN_CHARS])


class FleetError(Exception):
    """Base of all errors of ours.

    `code` is stable and machine-readable, `retryable` whether the same call may succeed later and `retry_after_s` how long to
    wait until then, `param` the field of the user's input that is at fault, if any.
    """

    code: ClassVar[str] = "server_error"
    retryable: ClassVar[bool] = False
    retry_after_s: int = 1

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class BadInput(FleetError):
    """The user's input is at fault; the message names the field and the fix."""

    code = "invalid_value"


class InputTooLarge(BadInput):
    """A body, prompt or audio clip exceeds a configured limit."""

    code = "input_too_large"


class ContextLengthExceeded(InputTooLarge):
    """A prompt has more tokens than the model, or this deployment, takes. Code and wording are those that clients look for."""

    code = "context_length_exceeded"

    @staticmethod
    def of(where: str, limit: int, however: str) -> "ContextLengthExceeded":
        """`where` names the field; `however` says what it holds instead of `limit` tokens."""
        return ContextLengthExceeded(
            f"{where}: This model's maximum context length is {limit} tokens. However, {however}. "
            f"Please reduce the length of the {where}.", param=where,
        )  # fmt: skip


class UnsupportedValue(BadInput):
    """Something that OpenAI's API, or a relative of it, knows and this server does not serve."""

    code = "unsupported_value"


class ModelNotFound(BadInput):
    code = "model_not_found"


class NotFound(BadInput):
    """Nothing of that name is known, or not any more."""

    code = "not_found"


class Conflict(BadInput):
    """It is there, and in a state in which this cannot be done to it."""

    code = "conflict"


class SecretInUse(BadInput):
    """A short-lived client secret has as many voice sessions open as it may."""

    code = "secret_in_use"


class ConfigError(FleetError):
    """The configuration is at fault; `param` is the dotted key."""

    code = "bad_config"


class NoSafeWeights(ConfigError):
    """A checkpoint has no weights as safetensors. Those of other files are pickles, and reading a pickle can run code."""

    @staticmethod
    def of(folder: object, wanted: str) -> "NoSafeWeights":
        pickled = "pickled weights (pytorch_model.bin and the like) are not read, since that can run code"
        fix = "fetch or convert them as safetensors"
        return NoSafeWeights(f"checkpoint: {folder} has no weights ({wanted}); {pickled}: {fix}", param="checkpoint")


class Overloaded(FleetError):
    """The queue bound is reached."""

    code = "rate_limit_exceeded"
    retryable = True


class VersionSkew(ConfigError):
    """A worker does not fit the registered ones: version, checkpoint, tensors it can read, or secret."""


class NoWorker(FleetError):
    """A role that the request needs has no live worker, and none is expected."""

    code = "overloaded"
    retryable = True

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int = 1) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class WorkerLost(FleetError):
    """Worker after worker died over the request, the last one with nothing else to do; it is among the dead letters."""

    code = "worker_lost"
    retryable = True


class Aborted(FleetError):
    """The request was ended on purpose, by the API or because its client's gateway is gone."""

    code = "aborted"


class GatewayStopping(FleetError):
    """The gateway leaves before the answer ends; any other goes on with it from the last event id."""

    code = "gateway_stopping"
    retryable = True


class RedisUnreachable(FleetError):
    code = "redis_unreachable"
    retryable = True


class StaleEpoch(FleetError):
    """A write bore an epoch older than the task's; the writer has lost its right and must drop the task."""

    code = "stale_epoch"


class ChunkOrderError(FleetError):
    """A chunk was appended or released out of order; a bug of ours."""

    code = "chunk_order"


class TransitionError(FleetError):
    """The state machine has no row for (state, event); a bug of ours."""

    code = "bad_transition"


class TransferError(FleetError):
    """Tensors could not be pulled (deadline, checksum, generation); they are made again."""

    code = "transfer_failed"
    retryable = True


class EngineError(FleetError):
    """The engine failed one request; the batch goes on."""

    code = "engine_error"


class OutOfPages(EngineError):
    """The KV pool cannot ever hold the request."""

    code = "context_length_exceeded"


class OutOfMemory(EngineError):
    """Work for one request found no memory; it may find some when less runs at once."""

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
"""What torch says in a plain RuntimeError: of a device the first, of the CPU the second."""


def failure_of(doing: str, error: Exception) -> FleetError:
    """What a request is told when work for it alone raised `error`; `doing` says which work failed."""
    if isinstance(error, FleetError):
        return error
    said = str(error) or type(error).__name__
    if isinstance(error, MemoryError) or any(words in said for words in NO_MEMORY):
        return OutOfMemory(
            f"{doing}: out of memory ({said}); shorten the prompt or lower max_tokens, or let the stage do less at once "
            "(stages.NAME.prefill_chunk_tokens, stages.NAME.max_batch)"
        )
    return EngineError(f"{doing}: {said}")


def from_code(code: str, message: str, param: str | None = None) -> FleetError:
    """Rebuild an error that crossed a wire; an unknown code becomes a plain FleetError."""
    return BY_CODE.get(code, FleetError)(message, param=param)
