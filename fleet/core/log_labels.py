"""Labels of a process's log lines. A worker's id changes when it rejoins; the code that registers
the worker updates its label.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Labels:
    """Labels that every log line of a process has. `process`: worker, conductor, web or jobs.
    `worker`, `stage`: id and stage of a worker, "" in other processes.
    """

    process: str
    worker: str = ""
    stage: str = ""
