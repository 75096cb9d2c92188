"""A server under rough treatment: many dropped streams, connections that come and go, its own overhead.

Starts `graphllm serve` with the embedded model on a free loopback port. serve_streams: concurrent streams, a third of
which are dropped at random moments; every other one must end well, at about the same resident memory, and nothing may
stay. serve_drops: connections dropped before, in and after the request and after the first token, with nothing left.
serve_overhead: CPU time of the front process for each token of concurrent streams. Ends with status 1 when something
was lost.

On CPUs oneDNN keeps something for each shape of a step that it has seen, 128 of them (graphllm/cli/__init__.py), so
short runs seem to grow.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import uvloop
from prometheus_client.parser import text_string_to_metric_families

from bench.harness import Case
from graphllm.cli.bench.client import HttpClient, Timeline
from graphllm.cli.bench.metrics import summarize
from graphllm.cli.bench.server import ServerProcess

CASES = [
    ("serve_streams", {"seconds": 60.0, "streams": 200, "seed": 0, "options": ""}),
    ("serve_drops", {"count": 10_000, "seed": 0, "options": ""}),
    ("serve_overhead", {"seconds": 20.0, "streams": 64, "seed": 0, "options": ""}),
]
HELP = {
    "streams": "streams at the same time",
    "count": "connections that are dropped",
    "options": "options of graphllm serve, in one word; without: few pages and a long queue",
}
PATH = "/v1/completions"
GROWTH, GROWTH_BYTES = 0.05, 20 << 20  # of resident memory over the second half; either is fine
STEP = 1.0  # seconds between readings of the memory
# Few pages, so that all of them were used, and their memory touched, long before the end.
OPTIONS = ("--max-num-queued-reqs", "20000", "--kv-cache-memory-bytes", "128MiB")
AT_ONCE = 50  # connections that are dropped at the same time
STAGES = ("before a byte", "in the header", "after the header", "in the body", "after the body", "after a token")


def body(rng: random.Random, tokens: int) -> bytes:
    prompt = [rng.randrange(1000) for _ in range(rng.randint(4, 64))]
    return json.dumps(
        {
            "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 1.0, "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()  # fmt: skip


def request(server: ServerProcess, payload: bytes) -> bytes:
    head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload


async def drop(server: ServerProcess, rng: random.Random, stage: str) -> None:
    """Connect, send as much as the stage says, and be gone; every second time with a reset."""
    whole = request(server, body(rng, rng.randint(16, 256)))
    header = whole.index(b"\r\n\r\n") + 4
    sent = {
        "before a byte": 0,
        "in the header": rng.randrange(1, header),
        "after the header": header,
        "in the body": rng.randrange(header + 1, len(whole)),
    }.get(stage, len(whole))
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(whole[:sent])
        await writer.drain()
        if stage == "after a token":
            await asyncio.wait_for(reader.readuntil(b'"text"'), 60)
        elif rng.random() < 0.5:
            await asyncio.sleep(rng.random() * 0.02)
    finally:
        if rng.random() < 0.5:
            writer.transport.abort()
        writer.close()


async def dropping(server: ServerProcess, rng: random.Random, dropped: Counter[str], refused: Counter[str]) -> None:
    """`drop` at one of the stages, counted."""
    stage = rng.choice(STAGES)
    try:
        await drop(server, rng, stage)
        dropped[stage] += 1
    except (OSError, asyncio.IncompleteReadError) as reason:
        refused[f"{stage}: {reason!r:.100}"] += 1


def gauges(server: ServerProcess) -> dict[str, float]:
    """What the server says is still there."""
    wanted = {
        "vllm:num_requests_running": "running",
        "vllm:num_requests_waiting": "waiting",
        "vllm:kv_cache_usage_perc": "kv cache usage",
    }
    return {
        wanted[sample.name]: sample.value
        for family in text_string_to_metric_families(server.get("/metrics"))
        for sample in family.samples
        if sample.name in wanted
    }


def settle(server: ServerProcess, problems: list[str]) -> dict[str, Any]:
    """Wait until nothing runs any more; how long that took. A server that keeps something is a problem, and so is one
    that does not answer."""
    begun = time.perf_counter()
    while any((left := gauges(server)).values()) and time.perf_counter() - begun < 30:
        time.sleep(0.05)
    seconds = time.perf_counter() - begun
    if len(left) != 3 or any(left.values()):
        problems.append(f"not released: {left}")
    after = uvloop.run(one(server, 8))
    if after.error is not None or after.output_tokens != 8:
        problems.append(f"the server does not answer afterwards: {after.error}")
    return {"not released": left, "seconds until nothing was left": round(seconds, 3)}


async def one(server: ServerProcess, tokens: int) -> Timeline:
    with contextlib.closing(HttpClient(server.url, timeout=60)) as client:
        return await client.stream(PATH, body(random.Random(0), tokens))


async def crowd(count: int, seconds: float, turn: Callable[[int], Awaitable[None]]) -> None:
    """So many workers, each taking turns until the time is over and its last turn is done."""
    end = time.perf_counter() + seconds

    async def worker(number: int) -> None:
        while time.perf_counter() < end:
            await turn(number)

    await asyncio.gather(*map(worker, range(count)))


def streams(server: ServerProcess, args: Case) -> dict[str, Any]:
    rng = random.Random(args.seed)
    done: list[Timeline] = []
    dropped: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    memory: list[dict[str, int]] = []

    async def run() -> None:
        client = HttpClient(server.url, timeout=120)

        async def turn(_: int) -> None:
            chance = rng.random()
            if chance < 0.1:
                await dropping(server, rng, dropped, refused)
            elif chance < 0.33:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(rng.random() * 3):
                        await client.stream(PATH, body(rng, 400))
                dropped["at a random time"] += 1
            else:
                done.append(await client.stream(PATH, body(rng, rng.randint(8, 128))))

        watcher = asyncio.create_task(watch(server, memory))
        await crowd(args.streams, args.seconds, turn)
        watcher.cancel()
        client.close()

    begun = time.perf_counter()
    uvloop.run(run())
    figures = summarize(done, time.perf_counter() - begun, {})
    problems = [f"{count} lost: {why}" for why, count in [*figures["failures"].items(), *refused.items()]]
    kept = {key: value for key, value in figures.items() if "tpot" not in key and "e2el" not in key}
    return {
        "streams": args.streams,
        "ended well": figures["completed"],
        "dropped": dict(dropped),
        **settle(server, problems),
        "memory": growth(memory, problems),
        "figures of those that were not dropped": kept,
        "problems": problems,
    }


async def watch(server: ServerProcess, memory: list[dict[str, int]]) -> None:
    """Resident bytes of the front and of all processes that it started."""
    while True:
        front, *rest = server.processes()
        memory.append({"front": front.rss, "engine": sum(p.rss for p in rest)})
        await asyncio.sleep(STEP)


def growth(memory: Sequence[dict[str, int]], problems: list[str]) -> dict[str, Any]:
    """MiB at the beginning, in the middle and at the end, each the median of some readings."""
    found = {}
    few = max(1, len(memory) // 10)
    middle = len(memory) // 2
    for name in ("front", "engine"):
        series = [row[name] for row in memory]
        parts = (series[:few], series[middle : middle + few], series[-few:])
        first, half, last = (statistics.median(part) for part in parts)
        found[name] = {"begin MiB": first / 2**20, "middle MiB": half / 2**20, "end MiB": last / 2**20}
        if last - half > max(GROWTH * half, GROWTH_BYTES):
            problems.append(f"the memory of the {name} grew from {half / 2**20:.1f} to {last / 2**20:.1f} MiB")
    return found


def drops(server: ServerProcess, args: Case) -> dict[str, Any]:
    rng = random.Random(args.seed)
    dropped: Counter[str] = Counter()
    refused: Counter[str] = Counter()

    async def run() -> None:
        left = iter(range(args.count))

        async def worker() -> None:
            for _ in left:
                await dropping(server, rng, dropped, refused)

        await asyncio.gather(*(worker() for _ in range(AT_ONCE)))

    before = server.processes()
    begun = time.perf_counter()
    uvloop.run(run())
    seconds = time.perf_counter() - begun
    problems = [f"{count} lost: {why}" for why, count in refused.items()]
    result = {"dropped": dict(dropped), "seconds": round(seconds, 2), **settle(server, problems)}
    after = server.processes()
    result["memory"] = {
        name: {"begin MiB": a.rss / 2**20, "end MiB": b.rss / 2**20}
        for name, a, b in zip(("front", "engine"), before, after, strict=False)
    }
    if [p.pid for p in before] != [p.pid for p in after]:
        problems.append("not all processes are the same as before")
    return {**result, "problems": problems}


def overhead(server: ServerProcess, args: Case) -> dict[str, Any]:
    rng = random.Random(args.seed)
    done: list[Timeline] = []

    async def run() -> None:
        client = HttpClient(server.url, timeout=120)

        async def turn(_: int) -> None:
            done.append(await client.stream(PATH, body(rng, 256)))

        await crowd(args.streams, args.seconds, turn)
        client.close()

    uvloop.run(one(server, 8))
    before, client, begun = server.processes(), time.process_time(), time.perf_counter()
    uvloop.run(run())
    seconds, client = time.perf_counter() - begun, time.process_time() - client
    after = server.processes()
    figures = summarize(done, seconds, {})
    tokens = figures["total_output_tokens"]
    problems = [f"{count} lost: {why}" for why, count in figures["failures"].items()]
    cpu = {
        name: b.cpu - a.cpu
        for name, a, b in zip(("front process", "engine process"), before, after, strict=False)
    }  # fmt: skip
    return {
        "streams": args.streams,
        "seconds": round(seconds, 2),
        "output tokens": tokens,
        "output tokens per second": round(figures["output_throughput"], 1),
        "tokens per chunk": round(figures["tokens_per_chunk"], 3),
        "CPU microseconds per output token": {
            name: round(1e6 * used / tokens, 1) for name, used in (*cpu.items(), ("this client", client))
        },
        "p50 and p99 ms between chunks": [round(figures["p50_itl_ms"], 2), round(figures["p99_itl_ms"], 2)],
        **settle(server, problems),
        "problems": problems,
    }


RUNS = {"serve_streams": streams, "serve_drops": drops, "serve_overhead": overhead}


def run(case: Case) -> Iterator[dict[str, Any]]:
    """The figures of a server; status 1 when something was lost."""
    options = case.options.split() or OPTIONS
    with ServerProcess(options) as server:
        server.wait_for("/health/ready", 600)
        result = RUNS[case.case](server, case)
        result["seconds from SIGTERM to the end"] = round(server.stop(60), 3)
        # Warnings, errors, and the lines that belong to them.
        log = [line for line in server.log.splitlines() if " INFO " not in line]
    if any("Traceback" in line for line in log):
        result["problems"].append("the log has a traceback")
    yield {"serve options": " ".join(options), **result, "warnings": log[-40:]}
    if result["problems"]:
        raise SystemExit(1)
