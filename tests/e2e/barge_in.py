"""Measure barge-in latency in Chromium on a real fleet: `python -m tests.e2e.barge_in [TIMES]`.

The latency lasts from the first voiced sample in the microphone's worklet to the last sample of the
answer that was played, by the browser's clocks. Numbers from a busy machine mean little.
"""

import statistics
import sys
import tempfile
from pathlib import Path

from tests.e2e.talking import VoiceFleet, interrupt, microphone, talking_fleet
from tests.web.voice import probe
from tests.web.voice.browsers import Browsers

TIMES = 10


def main(times: int) -> None:
    took_ms: list[float] = []
    with (
        tempfile.TemporaryDirectory() as name,
        talking_fleet(Path(name)) as fleet,
        Browsers.started(Path(name)) as browsers,
    ):
        _measure(browsers, fleet)  # warm-up
        for _ in range(times):
            took_ms.append(_measure(browsers, fleet))
            print(f"{took_ms[-1]:.0f} ms", flush=True)
    print(
        f"{times} interruptions: median {statistics.median(took_ms):.0f} ms, most "
        f"{max(took_ms):.0f} ms"
    )


def _measure(browsers: Browsers, fleet: VoiceFleet) -> float:
    with microphone(browsers, fleet) as page:
        interrupt(page)
        return probe.barge_in_ms(page)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else TIMES)
