"""Choice between implementations of one computation by measurement on the device that runs them.

The first candidate is the reference: a candidate that fails, or whose output differs from the
reference's by more than rounding, is not used. Results are kept in a file, so that the next start
measures nothing. Knows no implementation.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from fleet.engine.torch.device import check_device

log = logging.getLogger(__name__)

Work = Callable[[], Tensor | Sequence[Tensor]]
"""Function that runs a candidate once on fixed inputs and returns its output. It changes nothing
that the next run reads.
"""
FILE_NAME = "fastest.json"
TIME_LIMIT_S = 5.0
"""Time that one `Fastest` spends on measurements."""
TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 4e-3,
    torch.bfloat16: 2e-2,
}
"""Largest tolerated difference between two outputs by dtype, as the norm of the difference relative
to the reference's: a few roundings. TensorFloat-32 in place of float32 exceeds it. Other dtypes
must be equal.
"""
OUTLIERS = 10.0
"""Factor by which a single value may exceed this tolerance, relative to the reference's largest
value. Two equal probabilities at the edge of the chosen experts may be ordered either way, which
changes one row a little.
"""
HALVES = (torch.float16, torch.bfloat16)
NUM_REPEATS = 4
"""Number of timed runs after the first one; the shortest run counts."""
MAX_REPEATS_MS = 20.0
"""Duration of all repeated runs of a candidate: a slow candidate is run less often."""
GIVE_UP_FACTOR = 3.0
"""A candidate whose first timed run takes this many times as long as the fastest candidate is not
run again.
"""
HEAD_START_CYCLES = 1_000_000
"""GPU cycles, about 0.6 ms, for which the GPU is kept busy before a timed run, so that the run's
operations are queued when it begins: launches by the host are not part of the measured time.
"""


class FastestRow(NamedTuple):
    """Row of `Fastest.table`. `outcome`: milliseconds of one run, or the reason for which the
    candidate is not used.
    """

    key: str
    candidate: str
    outcome: float | str
    is_chosen: bool


class MeasuredKey(msgspec.Struct, frozen=True, kw_only=True):
    """Result of measuring one key. `outcomes`: milliseconds or reason, by candidate."""

    chosen: str
    outcomes: dict[str, float | str]

    def answers(self, names: Sequence[str]) -> bool:
        """Return True if exactly these candidates were measured, the chosen one among them."""
        return self.outcomes.keys() == set(names) and self.chosen in names


class _File(msgspec.Struct, frozen=True, kw_only=True):
    format: Literal["fastest-1"] = "fastest-1"
    measured: dict[str, MeasuredKey]


class Fastest:
    """Choice of the fastest candidate by key.

    `device`: device that runs the candidates. `folder`: folder of the file of results, created when
    needed; None keeps them in memory only. `precision`: precision of the weights, part of each key.
    `time_limit_s`: time for all measurements of this object; a process needs only one object per
    device. `clock`: function that returns seconds, which counts the time limit and times candidates
    on devices other than GPUs.

    On a GPU a time is that between two CUDA events around a run, which the host has queued before
    the first event occurs. A run cannot be interrupted, so a measurement may exceed the limit by
    the duration of the run in progress. To measure everything again, remove the file.
    """

    def __init__(
        self,
        device: torch.device,
        folder: Path | None = None,
        precision: str = "",
        *,
        time_limit_s: float = TIME_LIMIT_S,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._device = device
        self._path = None if folder is None else folder / FILE_NAME
        self._time_limit_s, self._clock = time_limit_s, clock
        self._spent_s = 0.0
        self._says_late = True
        self._environment = ", ".join(filter(None, (_environment(device), precision)))
        self._measured = self._read()
        self._used: dict[str, MeasuredKey] = {}

    def choose(self, key: str, candidates: Mapping[str, Work], default: str | None = None) -> str:
        """Return the name of the fastest candidate; measure all of them if no result for this key
        is known.

        `key`: text that identifies the computation: its name, shapes and dtype; the device and the
        versions of torch and Triton are added to it. `candidates`: implementations by name, the
        reference first. An implementation that changes gets a new name, since a result in the file
        holds for the names that were measured. `default`: candidate chosen without measurement once
        the time limit is reached; None for the reference. Raises: the reference's own error, or
        EngineStopped if a candidate has broken the device, and then the next start does not try it
        again.
        """
        full_key, names = f"{self._environment}, {key}", list(candidates)
        known = self._measured.get(full_key)
        if known is None or not known.answers(names):
            known = self._measure(full_key, candidates, known)
        if known is None:
            return names[0] if default is None else default
        self._used[key] = known
        return known.chosen

    def table(self) -> list[FastestRow]:
        """Return what is known about each key that `choose` was asked for, in that order."""
        return [
            FastestRow(key, name, outcome, name == measured.chosen)
            for key, measured in self._used.items()
            for name, outcome in measured.outcomes.items()
        ]

    def _measure(
        self, key: str, candidates: Mapping[str, Work], known: MeasuredKey | None
    ) -> MeasuredKey | None:
        """Measure and record a key; None if the time limit comes first. Candidates that failed in
        an earlier, incomplete measurement `known` are not run again.
        """
        began = self._clock()
        deadline = began + self._time_limit_s - self._spent_s
        try:
            return self._run_all(key, candidates, deadline, known.outcomes if known else {})
        finally:
            self._spent_s += self._clock() - began

    def _run_all(
        self,
        key: str,
        candidates: Mapping[str, Work],
        deadline: float,
        earlier: Mapping[str, float | str],
    ) -> MeasuredKey | None:
        reference = next(iter(candidates))
        outcomes: dict[str, float | str] = {}
        expected: list[Tensor] | None = None
        for name, work in candidates.items():
            if self._clock() >= deadline:
                self._say_late(key)
                return None
            reason = earlier.get(name)
            if isinstance(reason, str) and name != reference:
                outcomes[name] = reason
                continue
            if expected is None:
                # copies, since the next candidate may write to the same memory
                expected = [each.clone() for each in _listed(work())]
                outcomes[name] = self._time_ms(work, float("inf"))
                continue
            outcomes[name] = self._outcome(key, name, work, expected, outcomes)
            if isinstance(outcomes[name], str):
                self._keep(key, MeasuredKey(chosen=reference, outcomes=dict(outcomes)))
                check_device(self._device)
        times = {name: ms for name, ms in outcomes.items() if isinstance(ms, float)}
        measured = MeasuredKey(chosen=min(times, key=times.__getitem__), outcomes=outcomes)
        log.debug("fastest of %s: %s of %s", key, measured.chosen, outcomes)
        self._keep(key, measured)
        return measured

    def _outcome(
        self,
        key: str,
        name: str,
        work: Work,
        expected: Sequence[Tensor],
        outcomes: Mapping[str, float | str],
    ) -> float | str:
        best_ms = min(ms for ms in outcomes.values() if isinstance(ms, float))
        try:
            reason = _difference(_listed(work()), expected)
            if not reason:
                return self._time_ms(work, best_ms)
        except Exception as error:  # compilers of kernels raise errors of any kind
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        log.warning("%s: candidate %s is not used: %s", key, name, reason)
        return reason

    def _time_ms(self, work: Work, best_ms: float) -> float:
        """Return the shortest duration of several runs, fewer for a slow candidate."""
        first = self._run_ms(work)
        if first > GIVE_UP_FACTOR * best_ms:
            return first
        num_repeats = min(NUM_REPEATS, int(MAX_REPEATS_MS / max(first, MAX_REPEATS_MS / 1000)))
        return min([first, *(self._run_ms(work) for _ in range(num_repeats))])

    def _run_ms(self, work: Work) -> float:
        if self._device.type != "cuda":
            began = self._clock()
            work()
            return (self._clock() - began) * 1000
        with torch.cuda.device(self._device):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(HEAD_START_CYCLES)  # pyright: ignore[reportPrivateUsage]
            start.record()
            work()
            stop.record()
            stop.synchronize()
            return start.elapsed_time(stop)

    def _say_late(self, key: str) -> None:
        if self._says_late:
            log.warning(
                "measurements have reached their limit of %g s; default candidates are used from "
                "%s on, until a later start has measured them",
                self._time_limit_s,
                key,
            )
        self._says_late = False

    def _read(self) -> dict[str, MeasuredKey]:
        if self._path is None or not self._path.exists():
            return {}
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_File).measured
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("%s is ignored, since it cannot be read: %s", self._path, error)
            return {}

    def _keep(self, key: str, measured: MeasuredKey) -> None:
        """Record a result, and write it with those that other processes have written meanwhile."""
        self._measured[key] = measured
        if self._path is None:
            return
        if self._path.exists():
            self._measured = self._read() | self._measured
        part = self._path.with_suffix(f".{os.getpid()}")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            part.write_bytes(msgspec.json.encode(_File(measured=self._measured)))
            part.replace(self._path)
        except OSError as error:
            log.warning("%s cannot be written, results stay in memory: %s", self._path, error)
            self._path = None


def _environment(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return f"{name}, torch {torch.__version__}, triton {triton}"


def _listed(output: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return [output] if isinstance(output, Tensor) else output


def _difference(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """Return a description of how outputs differ beyond rounding; "" if they do not."""
    shapes, wanted = ([tuple(each.shape) for each in tensors] for tensors in (outputs, expected))
    if shapes != wanted:
        return f"its output has the shapes {shapes}, not {wanted}"
    for output, reference in zip(outputs, expected, strict=True):
        if not reference.numel():
            continue
        tolerance = TOLERANCES.get(reference.dtype, 0.0)
        wide = torch.float32 if reference.dtype in HALVES else torch.float64
        exact, error = reference.to(wide), output.to(wide) - reference.to(wide)
        size, largest = float(exact.norm()), float(exact.abs().max())
        # not a number on either side is a difference
        if not float(error.norm()) <= tolerance * size:
            return f"its output differs by {float(error.norm()) / (size or 1.0):.2%} in norm"
        if not float(error.abs().max()) <= OUTLIERS * tolerance * largest:
            most = float(error.abs().max())
            return f"its output differs by {most:.3g} where values reach {largest:.3g}"
    return ""
