"""Labels of a process's log lines. A worker's id changes when it rejoins; the code that registers
it updates the label.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Labels:
    """`process`: worker, conductor, web or jobs."""

    process: str
    worker: str = ""
    stage: str = ""
