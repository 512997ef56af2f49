"""The words of `fleet bench`, and what they mean. Measures nothing."""

import argparse
from dataclasses import dataclass
from pathlib import Path

STREAMS = (10, 300)
EPILOG = """\
What is measured
  serving      streamed chat completions over HTTP, greedy, every stage bounded: first text, first sound, last sample,
               gaps between chunks, and whether a listener who starts at the first chunk ever runs dry; first one
               request at a time, then --concurrency at a time
  --baseline   the same prompts and bounds by the reference implementation, one after another, while the fleet is idle;
               and whether both gave the same answers
  --twin       the fleet's own stages in one process, without Redis or transfers: the price of being many processes
  --hop        one chunk from append to delivery through real Redis
  --transfer   tensor reads between two processes
  --scale      real-time streams on the fake engine, 12.5 chunks a second each, on a fleet of its own: how late chunks
               arrive, what CPU a chunk costs at each of --streams; then a role with slots for half of the streams, and a
               second worker that joins it meanwhile. Every answer is compared with what it must be
  --hand-off   prefill and decode by workers of their own: from the last step of one to the first step of the next, part
               by part; and keys and values read block by block, beside one plain read of as many bytes
  --interference
               gaps between the pieces of running answers while a train of long prompts arrives: prefill and decode
               together, then split, by as many workers. --concurrency answers run all the time, --requests long prompts
               come
  --voice      spoken questions over the Realtime WebSocket, as a microphone sends them: from the last voiced sample to the
               first sound of the answer, and where that time goes; in the fleet's own voice, or from --wav files.
               With --sessions N so many people talk at once, over both sockets, each playing what comes at its own pace:
               whether anybody's sound ran dry, how late it came, what CPU each process took; where the fleet is started
               for it, one more comes, is told its place in line, and let in when somebody leaves
  --barge-in   the same voice speaks into --requests answers: from its first voiced sample to the end of the answer, to all
               stages idle, and to their memory free again
  --hand-off and --interference start fleets of their own. A deployment that splits nothing is split wherever it can be;
  the checkpoint is a tiny random one unless one is named.

Examples
  fleet bench                                       the fleet at http://127.0.0.1:8000
  fleet bench --up --baseline transformers          start a fleet, measure it, compare it, stop it
  fleet bench --up --set checkpoint=/models/x --requests 32 --concurrency 16 --json out.json --png out.png
  fleet bench --url http://gpu-box:8000 --max-tokens 200 --frames 400
  fleet bench --voice --up                          how long a speaker waits for the answer
  fleet bench --voice --sessions 50 --engine fake --requests 4
                                                    fifty people talk to one gateway
  fleet bench --hop --transfer                      no fleet is needed
  fleet bench --scale --streams 10,300 --check      the control plane alone
  fleet bench --hand-off --interference --png x.png what splitting costs, and what it buys
  fleet bench --hand-off --config configs/thinker_pd.yaml --set checkpoint=/models/x --set device=cuda

Numbers from a busy machine mean little: the report says how many cores other processes kept busy meanwhile.
Exit status: 0 measured, 1 it could not be measured (one line says why) or, with --check, a target was missed,
2 a usage mistake.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Invariants: `url` or `up`, never both; counts are positive. `serving` is whether a fleet is measured at all."""

    serving: bool
    url: str | None
    up: bool
    config: Path | None
    overrides: tuple[str, ...]
    requests: int
    concurrency: int
    max_tokens: int
    frames: int
    warm_up: int
    baseline: bool
    baseline_threads: int | None
    twin: bool
    hop: bool
    hops: int
    transfer: bool
    scale: bool
    streams: tuple[int, ...]
    scale_seconds: int
    hand_off: bool
    hand_offs: int
    interference: bool
    prompt_tokens: int
    voice: bool
    sessions: int
    engine: str | None
    barge_in: bool
    wavs: tuple[Path, ...]
    json: Path | None
    png: Path | None
    check: bool


def parse(args: list[str]) -> BenchOptions:
    """Raises: SystemExit with status 0 after --help, 2 after a usage mistake."""
    parser = _parser()
    given = parser.parse_args(args)
    if given.url and given.up:
        parser.error("--url measures a fleet that runs, --up starts one: give one of them")
    voice = given.voice or bool(given.sessions or given.engine) or (bool(given.wav) and not given.barge_in)
    if given.engine and (given.url or not given.sessions):
        parser.error("--engine fake starts a fleet for --sessions N: give that, and no --url")
    if given.sessions and given.barge_in:
        parser.error("--barge-in measures one voice: give --sessions in a run of its own")
    spoken = voice or given.barge_in
    apart = given.hop or given.transfer or given.scale or given.hand_off or given.interference or spoken
    alone = apart and not (given.baseline or given.twin or ((given.url or given.up) and not spoken))
    return BenchOptions(
        serving=not alone,
        url=given.url,
        up=given.up or given.engine is not None,
        config=given.config,
        overrides=tuple(given.set),
        requests=given.requests,
        concurrency=given.concurrency,
        max_tokens=given.max_tokens,
        frames=given.frames,
        warm_up=given.warm_up,
        baseline=given.baseline is not None,
        baseline_threads=given.baseline_threads,
        twin=given.twin,
        hop=given.hop,
        hops=given.hops,
        transfer=given.transfer,
        scale=given.scale,
        streams=tuple(sorted({count for counts in given.streams or [STREAMS] for count in counts})),
        scale_seconds=given.scale_seconds,
        hand_off=given.hand_off,
        hand_offs=given.hand_offs,
        interference=given.interference,
        prompt_tokens=given.prompt_tokens,
        voice=voice,
        sessions=given.sessions or 1,
        engine=given.engine,
        barge_in=given.barge_in,
        wavs=tuple(given.wav),
        json=given.json,
        png=given.png,
        check=given.check,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fleet bench",
        description="Measure a fleet as its clients see it, and compare it with the reference implementation.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    fleet = parser.add_argument_group("which fleet")
    fleet.add_argument("--url", help="the gateway of a running fleet (default: 127.0.0.1 at the deployment's web.port)")
    fleet.add_argument("--up", action="store_true", help="start a fleet on free ports with a Redis of its own; stop it after")
    fleet.add_argument("--config", type=Path, metavar="FILE", help="the deployment file, as for `fleet up`")
    fleet.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one key of it; repeatable")
    load = parser.add_argument_group("the load")
    load.add_argument("--requests", type=_positive, default=16, metavar="N", help="requests per phase (16)")
    load.add_argument("--concurrency", type=_positive, default=8, metavar="C", help="at a time in the second phase (8)")
    load.add_argument("--max-tokens", type=_at_least_two, default=24, metavar="T", help="answer tokens at most (24)")
    load.add_argument("--frames", type=_at_least_two, default=60, metavar="F", help="bound of the later sampling stages (60)")
    load.add_argument("--warm-up", type=_count, default=3, metavar="N", help="requests before that do not count (3)")
    also = parser.add_argument_group("what else")
    also.add_argument("--baseline", choices=["transformers"], help="compare with the reference implementation")
    also.add_argument("--baseline-threads", type=_positive, metavar="N", help="its CPU threads (default: one or all, the better)")
    also.add_argument("--twin", action="store_true", help="compare with the same stages in one process")
    also.add_argument("--hop", action="store_true", help="time append to delivery through a Redis started for it")
    also.add_argument("--hops", type=_positive, default=1000, metavar="N", help="how many of them (1000)")
    also.add_argument("--transfer", action="store_true", help="time tensor reads between two processes")
    also.add_argument("--scale", action="store_true", help="load the control plane alone, on the fake engine")
    also.add_argument("--streams", type=_counts, action="append", metavar="N,N", help="how many at once; repeatable (10,300)")
    also.add_argument("--scale-seconds", type=_positive, default=10, metavar="S", help="of each of its windows (10)")
    also.add_argument("--hand-off", action="store_true", help="time what lies between a prefill and a decode worker")
    also.add_argument("--hand-offs", type=_positive, default=60, metavar="N", help="how many of them, of each split stage (60)")
    also.add_argument("--interference", action="store_true", help="long prompts beside running answers, together and split")
    also.add_argument("--prompt-tokens", type=_positive, default=4000, metavar="N", help="length of such a long prompt (4000)")
    also.add_argument("--voice", action="store_true", help="time spoken turns over the Realtime WebSocket, --requests of them")
    also.add_argument("--barge-in", action="store_true", help="time interruptions of answers over the Realtime WebSocket")
    also.add_argument("--wav", type=Path, action="append", default=[], metavar="FILE", help="a spoken question; repeatable")
    also.add_argument("--sessions", type=_positive, metavar="N", help="of --voice at once, each of --requests turns (1)")
    also.add_argument("--engine", choices=["fake"], help="of a fleet started for --sessions: it computes nothing")
    out = parser.add_argument_group("the report")
    out.add_argument("--json", type=Path, metavar="FILE", help="every number, and what it was measured on")
    out.add_argument("--png", type=Path, metavar="FILE", help="the numbers as a picture")
    out.add_argument("--check", action="store_true", help="end with status 1 if a target is missed")
    return parser


def _positive(text: str) -> int:
    return _whole(text, 1)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _count(text: str) -> int:
    return _whole(text, 0)


def _at_least_two(text: str) -> int:
    """The reference implementation cannot speak an answer of one token, nor one of one frame."""
    return _whole(text, 2)


def _whole(text: str, low: int) -> int:
    if not text.isdigit() or int(text) < low:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {low}")
    return int(text)
