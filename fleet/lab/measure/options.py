"""Arguments of `fleet bench`. Measures nothing."""

import argparse
from collections.abc import Callable
from pathlib import Path

STREAMS = (10, 300)
WITH_SMALL = (
    "--gpu",
    "--spans",
    "--span-hops",
    "--too-large",
    "--links",
    "--speculation",
    "--training",
)
EPILOG = """\
What is measured
  serving      streamed chat completions over HTTP, greedy, every stage bounded: first text, first audio, last sample,
               gaps between chunks, and stalls of a client that plays from the first chunk on; first one request at a
               time, then --concurrency at a time
  --baseline   the same prompts and bounds on the reference implementation, one after another, while the fleet is idle;
               and if both gave the same answers
  --twin       the fleet's stages in one process, without Redis or transfers: the cost of separate processes
  --hop        one chunk from append to delivery through real Redis
  --transfer   tensor reads between two processes
  --scale      real-time streams on the fake engine, 12.5 chunks a second each, on a fleet started for it: how late chunks
               arrive, and the CPU per chunk, for each count of --streams; then a role with slots for half of the
               streams, and a second worker that joins it. Every answer is compared with the expected one. Then without
               workers: the CPU of Redis and its append-only file per chunk; submissions with up to 1,000 workers; how
               soon 3,000 answers move; a turn of the conductor with 15,000 waiting grants; fewer with less than 300 streams
  --hand-off   prefill and decode in separate workers: from the last step of one to the first step of the next, part by
               part; and KV rows read block by block, compared with one plain read of as many bytes
  --interference
               gaps between the chunks of running answers while long prompts arrive: prefill and decode together, then
               split, with as many workers. --concurrency answers run all the time; --requests long prompts arrive
  --engines    tokens per second of the torch engine and of vLLM's LLM.generate, each in one process, at batch 1, 8 and 32,
               and of a fleet on vLLM at 8 and 32: greedy answers of 128 tokens. Needs vLLM, and a graph that it serves
  --spans      one model in one process, and its layers divided between two, in either direction: tokens per second of a long
               prompt, and of decode at 1 and 32 requests, beside what both compute without any transfer. A core and a thread
               per process; without Redis. Then passes of a tiny model through 1 and 3 span workers. The model is a random one
               of 254 million parameters unless --set checkpoint= names another; with --small it is tiny
  --span-hops  blocks of 16 KiB to 64 MiB between two processes: on a TCP connection, and through a ring of memory that NIXL reads
               (stages.*.spans.nixl_kib), in the memory of this host and over TCP. With --small the small ones only
  --too-large  a random model of 2.8 GB in one process without a limit of memory; then, with a limit of 0.65 of its peak for each
               process (RLIMIT_DATA), in one process, and divided as planned between two: tokens per second, and memory
  --links      decode steps of a model divided between three processes, in network namespaces whose links have a delay of 10 ms,
               and are made for the run (Linux, as root): the time beyond the computation, beside messages of the same sizes
               over plain TCP on these links
  --speculation
               one stage in one process, which answers held-out questions of Pocket's corpus with each drafter and without, at
               batch 1, 4, 8 and 16, in fast and in invariant numerics: tokens per second, tokens of a request per pass, and
               the share of accepted drafts by position. `suffix` has served 3,000 other questions before, and the head of
               `eagle3` is trained on their answers for 16 minutes. With --set graph=text --set checkpoint=DIR a model of your
               own, with --small a few questions
  --training   answers of a fleet while a quarter of them is captured, and without captures, in turn: tokens per second, with a
               trainer that computes nothing, and with one that trains on the same cores. Then two versions of the draft head are
               exchanged each second, under load: gaps of answers. With --small a few answers
  --voice      spoken questions over the Realtime WebSocket in real time: from the last voiced sample to the first audio
               of the answer, and the parts of that time; questions in the fleet's own voice, or from --wav files.
               With --sessions N as many sessions run concurrently, over the API's and the console's sockets, each with
               real-time playback: underruns, late audio, CPU of each process. A fleet that is started for it gets one
               session beyond its limit, which is queued, and admitted when another leaves
  --gpu        the torch engine on this machine's GPU, without a fleet: the published size of the model with random weights,
               all stages in one process. Steps of each stage as a graph and without it at 1, 8 and 32 requests, beside
               the time that copying the bytes they read takes; first audio; audio per second; memory. With --small the
               same on the CPU at a small size
  --barge-in   speech into --requests answers: from its first voiced sample until the answer has ended, all stages are
               idle, and their memory is free
  --hand-off, --interference and --engines start fleets of their own. For the first two, a deployment without split stages
  is split wherever it can be; the checkpoint is a tiny random one unless one is named.

Examples
  fleet bench                                       the fleet at http://127.0.0.1:8000
  fleet bench --up --baseline transformers          start a fleet, measure it, compare it, stop it
  fleet bench --up --set checkpoint=/models/x --requests 32 --concurrency 16 --json out.json --png out.png
  fleet bench --url http://gpu-box:8000 --max-tokens 200 --frames 400
  fleet bench --voice --up                          latency of spoken turns
  fleet bench --voice --sessions 50 --engine fake --requests 4
                                                    fifty voice sessions on one gateway
  fleet bench --hop --transfer                      no fleet is needed
  fleet bench --gpu --json gpu.json --check         this machine's GPU; needs neither Redis nor NIXL
  fleet bench --scale --streams 10,300 --check      the control plane alone
  fleet bench --hand-off --interference --png x.png cost and benefit of splitting
  fleet bench --engines --set graph=text            engines compared, where vLLM is installed
  fleet bench --spans --check                       cost and benefit of dividing a model's layers
  fleet bench --links --check                       a divided model over slow links
  fleet bench --hand-off --config configs/thinker_pd.yaml --set checkpoint=/models/x --set device=cuda

Numbers from a busy machine mean little: the report gives the background load.
Exit status: 0 measured, 1 the measurement failed (one line gives the cause) or, with --check, a target was missed,
2 invalid arguments.
"""


class BenchOptions(argparse.Namespace):
    """The arguments, as the parser sets them. Invariants: `url` or `up`, never both; counts are
    positive.

    `serving`: the serving benchmark runs.
    """

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
    baseline: str | None
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
    engines: bool
    spans: bool
    span_hops: bool
    too_large: bool
    links: bool
    speculation: bool
    training: bool
    prompt_tokens: int
    voice: bool
    sessions: int
    engine: str | None
    barge_in: bool
    gpu: bool
    small: bool
    wavs: tuple[Path, ...]
    json: Path | None
    png: Path | None
    check: bool


def parse(args: list[str]) -> BenchOptions:
    """Parse the arguments. Raises: SystemExit with status 0 after --help, 2 for invalid ones."""
    parser = _parser()
    options = parser.parse_args(args, BenchOptions())
    if options.url and options.up:
        parser.error("--url measures a running fleet, --up starts one: give one of them")
    if options.engine and (options.url or not options.sessions):
        parser.error("--engine fake starts a fleet for --sessions N: give that, and no --url")
    if options.sessions and options.barge_in:
        parser.error("--barge-in measures one session: give --sessions in a run of its own")
    of_spans = options.spans or options.span_hops or options.too_large or options.links
    of_drafts = options.speculation or options.training
    if options.small and not (options.gpu or of_spans or of_drafts):
        parser.error(f"--small is the small size of {', '.join(WITH_SMALL)}: give one of them")
    wavs_of_voice = bool(options.wavs) and not options.barge_in
    options.voice = options.voice or bool(options.sessions) or bool(options.engine) or wavs_of_voice
    spoken = options.voice or options.barge_in
    partial = bool(
        options.hop or options.transfer or options.scale or options.hand_off or options.interference
    )
    partial = partial or bool(options.engines or of_spans or of_drafts or spoken)
    of_a_fleet = (
        options.url
        or options.up
        or options.config
        or options.overrides
        or options.baseline
        or options.twin
    )
    if options.gpu and (partial or of_a_fleet or options.png):
        parser.error(
            "--gpu measures a device without a fleet and without a picture: give it alone, or "
            "with --small, --json, --check"
        )
    partial = partial or options.gpu
    options.serving = not partial or bool(
        options.baseline or options.twin or ((options.url or options.up) and not spoken)
    )
    options.up = options.up or options.engine is not None
    options.sessions = options.sessions or 1
    options.overrides, options.wavs = tuple(options.overrides), tuple(options.wavs)
    lists: list[tuple[int, ...]] = vars(options)["streams"] or [STREAMS]
    options.streams = tuple(sorted({count for counts in lists for count in counts}))
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fleet bench",
        description="Measure a fleet through its API, and compare it with the reference "
        "implementation.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    fleet = parser.add_argument_group("fleet")
    fleet.add_argument(
        "--url", help="gateway of a running fleet (default: 127.0.0.1 at the deployment's web.port)"
    )
    fleet.add_argument(
        "--up", action="store_true", help="start a fleet on free ports, and stop it afterwards"
    )
    fleet.add_argument(
        "--config", type=Path, metavar="FILE", help="deployment file, as for `fleet up`"
    )
    fleet.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one of its keys; repeatable",
    )
    load = parser.add_argument_group("load")
    load.add_argument(
        "--requests", type=_positive, default=16, metavar="N", help="requests per phase (16)"
    )
    load.add_argument(
        "--concurrency",
        type=_positive,
        default=8,
        metavar="C",
        help="requests at a time in the second phase (8)",
    )
    # Two or more: the reference implementation cannot speak an answer of one token or one frame.
    load.add_argument(
        "--max-tokens",
        type=_at_least(2),
        default=24,
        metavar="T",
        help="maximum answer tokens (24)",
    )
    load.add_argument(
        "--frames",
        type=_at_least(2),
        default=60,
        metavar="F",
        help="maximum rows of later sampling stages (60)",
    )
    load.add_argument(
        "--warm-up",
        type=_at_least(0),
        default=3,
        metavar="N",
        help="requests before the measurement (3)",
    )
    also = parser.add_argument_group("other measurements")
    also.add_argument(
        "--baseline", choices=["transformers"], help="compare with the reference implementation"
    )
    also.add_argument(
        "--baseline-threads",
        type=_positive,
        metavar="N",
        help="its CPU threads (default: one or all)",
    )
    also.add_argument(
        "--twin", action="store_true", help="compare with the same stages in one process"
    )
    also.add_argument(
        "--hop",
        action="store_true",
        help="measure append to delivery through a Redis started for it",
    )
    also.add_argument(
        "--hops", type=_positive, default=1000, metavar="N", help="number of hops (1000)"
    )
    also.add_argument(
        "--transfer", action="store_true", help="measure tensor reads between two processes"
    )
    also.add_argument(
        "--scale", action="store_true", help="load the control plane alone, on the fake engine"
    )
    also.add_argument(
        "--streams",
        type=_counts,
        action="append",
        metavar="N,N",
        help="concurrent streams; repeatable (10,300)",
    )
    also.add_argument(
        "--scale-seconds",
        type=_positive,
        default=10,
        metavar="S",
        help="length of each measured window (10)",
    )
    also.add_argument(
        "--hand-off", action="store_true", help="measure hand-offs from prefill to decode workers"
    )
    also.add_argument(
        "--hand-offs",
        type=_positive,
        default=60,
        metavar="N",
        help="number of hand-offs of each split stage (60)",
    )
    also.add_argument(
        "--interference",
        action="store_true",
        help="measure the delay that long prompts cause to running answers",
    )
    also.add_argument(
        "--engines", action="store_true", help="compare the torch engine, vLLM, and a fleet on vLLM"
    )
    also.add_argument(
        "--spans",
        action="store_true",
        help="measure a model whose layers are divided between processes",
    )
    also.add_argument(
        "--span-hops",
        action="store_true",
        help="measure rows between span workers by TCP and by NIXL",
    )
    also.add_argument(
        "--too-large",
        action="store_true",
        help="measure spans of a model that is too large for one process",
    )
    also.add_argument(
        "--links",
        action="store_true",
        help="measure decode steps of spans over slow links, as root",
    )
    also.add_argument(
        "--speculation", action="store_true", help="measure answers with each drafter"
    )
    also.add_argument(
        "--training",
        action="store_true",
        help="measure answers beside captures, and exchanges of the draft head",
    )
    also.add_argument(
        "--prompt-tokens",
        type=_positive,
        default=4000,
        metavar="N",
        help="length of a long prompt (4000)",
    )
    also.add_argument(
        "--voice",
        action="store_true",
        help="measure --requests spoken turns over the Realtime WebSocket",
    )
    also.add_argument(
        "--barge-in",
        action="store_true",
        help="measure --requests interruptions over the Realtime WebSocket",
    )
    also.add_argument(
        "--gpu",
        action="store_true",
        help="measure the torch engine on this machine's GPU, without a fleet",
    )
    also.add_argument(
        "--small", action="store_true", help=f"for {', '.join(WITH_SMALL)}: a small size"
    )
    also.add_argument(
        "--wav",
        dest="wavs",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a spoken question; repeatable",
    )
    also.add_argument(
        "--sessions",
        type=_positive,
        metavar="N",
        help="concurrent --voice sessions of --requests turns (1)",
    )
    also.add_argument(
        "--engine", choices=["fake"], help="for --sessions: start a fleet that computes nothing"
    )
    out = parser.add_argument_group("report")
    out.add_argument("--json", type=Path, metavar="FILE", help="every number, and the machine")
    out.add_argument("--png", type=Path, metavar="FILE", help="a picture of the numbers")
    out.add_argument(
        "--check", action="store_true", help="exit with status 1 if a target is missed"
    )
    return parser


def _at_least(low: int) -> Callable[[str], int]:
    """Return a parser of whole numbers of at least `low`."""

    def parse_number(text: str) -> int:
        if not text.isdigit() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {low}")
        return int(text)

    return parse_number


_positive = _at_least(1)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))
