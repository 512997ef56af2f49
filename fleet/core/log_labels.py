"""Who a process is in its log lines. A worker's id changes when it joins anew, so the one who joins writes it here."""

from dataclasses import dataclass


@dataclass(slots=True)
class Labels:
    """`process`: worker, conductor, web or jobs."""

    process: str
    worker: str = ""
    stage: str = ""
