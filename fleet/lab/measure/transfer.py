"""Transfer benchmark: tensor reads between two processes, from the size of a few hidden states to a
long prompt's.
"""

from rich.console import Group

from fleet.lab.measure.measurement import Context, Measurement
from fleet.lab.measure.reads import ReadSpeed, measure_reads
from fleet.lab.report.result import Result
from fleet.lab.report.tables import table_of, titled

SIZES_BYTES = (4 * 1024, 64 * 1024, 1024 * 1024, 16 * 1024 * 1024)


class TransferResult(Result, frozen=True, kw_only=True):
    """Read speed for each tensor size."""

    reads: tuple[ReadSpeed, ...]

    def tables(self) -> list[Group]:
        table = table_of("bytes", "p50 us", "GB/s")
        for read in self.reads:
            table.add_row(f"{read.num_bytes}", f"{read.p50_us:.0f}", f"{read.gb_per_s:.2f}")
        return [titled("tensor reads between two processes", table)]


def measure_transfer(context: Context) -> TransferResult:
    """Measure reads of each size. Raises: ConfigError if NIXL does not start, TransferError if a
    read fails.
    """
    done = context.steps("tensor reads")
    reads = measure_reads(SIZES_BYTES)
    done()
    return TransferResult(reads=tuple(reads))


MEASUREMENT = Measurement(
    place=20,
    key="transfer",
    run=measure_transfer,
    option="--transfer",
    help="measure tensor reads between two processes",
    about={"--transfer": "tensor reads between two processes"},
)
