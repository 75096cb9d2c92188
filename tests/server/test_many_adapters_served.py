"""A thousand requests over two hundred adapters that come and go while they run, some cut off by their clients, and an
engine that is killed on the way: each answer is what its adapter gives alone, and nothing is left behind. Slow."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.engine.adapters.test_many_adapters import COUNT, Model, V
from tests.server.live import Served
from tests.waiting import PATIENCE, until_async

pytestmark = pytest.mark.slow
ADAPTERS, REQUESTS, CLIENTS = 200, 1000, 16


class Traffic:
    """What clients do, and what became of it. Names are the numbers of adapters; "base" is the model itself."""

    def __init__(self, model: Model, server: Served) -> None:
        self.model, self.server, self.rng = model, server, random.Random(3)
        self.loaded: set[int] = set()
        self.seen: Counter[str] = Counter()
        self.left = REQUESTS
        self.killed = False
        self.client = httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, limits=httpx.Limits(max_connections=40))

    async def run(self) -> None:
        """Until all requests have been sent and answered."""
        async with self.client:
            for number in range(1, 41):
                await self._load(number)
            await asyncio.gather(self._come_and_go(), *(self._ask_again() for _ in range(CLIENTS)))
            for number in list(self.loaded):
                await self._unload(number)

    async def _load(self, number: int) -> None:
        folder = self.model.adapters[number].folder
        body = {"lora_name": f"{number}", "lora_path": folder}
        found = await self.client.post("/v1/load_lora_adapter", json=body)
        assert found.status_code in ((200,) if not self.killed else (200, 503)), found.text
        if found.status_code == 200:
            self.loaded.add(number)
            self.seen["loaded"] += 1

    async def _unload(self, number: int) -> None:
        self.loaded.discard(number)
        found = await self.client.post("/v1/unload_lora_adapter", json={"lora_name": f"{number}"})
        assert found.status_code == 200, found.text
        self.seen["unloaded"] += 1

    async def _come_and_go(self) -> None:
        while self.left > 0:
            await asyncio.sleep(self.rng.random() / 40)
            away = [n for n in range(1, ADAPTERS + 1) if n not in self.loaded]
            if away and (len(self.loaded) < 30 or self.rng.random() < 0.5):
                await self._load(self.rng.choice(away))
            else:
                await self._unload(self.rng.choice(sorted(self.loaded)))

    async def _ask_again(self) -> None:
        while self.left > 0:
            self.left -= 1
            if self.left == REQUESTS // 2:
                self.killed = True
                os.kill(self.server.engine_pid, signal.SIGKILL)
            number = self.rng.choice([0, *self.loaded])
            prompt = [self.rng.randrange(V) for _ in range(self.rng.choice([1, 6, 17, 40]))]
            tokens = await self._ask(number, prompt, cut=self.rng.random() < 0.1)
            if tokens is not None:
                assert tokens == self.model.expected(number, prompt), (number, prompt)
                self.seen["answered"] += 1
            await asyncio.sleep(self.rng.random() / 20)

    async def _ask(self, number: int, prompt: list[int], cut: bool) -> list[int] | None:
        """The tokens of a whole answer; None where there was none, for a reason that is counted."""
        body: dict[str, Any] = {
            "model": f"{number}" if number else "base", "prompt": prompt, "max_tokens": COUNT, "temperature": 0,
            "ignore_eos": True, "stream": True, "return_token_ids": True,
        }  # fmt: skip
        tokens: list[int] = []
        async with self.client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                told = (await response.aread()).decode()
                gone = response.status_code == 404 and number not in self.loaded
                assert gone or (response.status_code == 503 and self.killed), told
                self.seen["not loaded any more" if gone else "engine down"] += 1
                if gone:
                    return None
                await until_async(self._is_ready)
                return await self._ask(number, prompt, cut)
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    assert self.killed, event
                    self.seen["engine lost"] += 1
                    return None
                tokens += [t for choice in event["choices"] for t in choice["token_ids"] or []]
                if cut and len(tokens) >= 2:
                    self.seen["cut"] += 1
                    return None
        return tokens

    async def _is_ready(self) -> bool:
        return (await self.client.get("/health/ready")).status_code == 200


def test_a_thousand_requests_over_two_hundred_adapters(tmp_path: Path) -> None:
    model = Model(tmp_path, ADAPTERS)
    words = WordLevel({f"w{i}": i for i in range(V)}, unk_token="w0")
    Tokenizer(words).save(str(model.folder / "tokenizer.json"))
    server = Served(
        tmp_path / "log", model.folder, "--backend", "eager", "--dtype", "float32", "--max-model-len", 64,
        "--max-num-seqs", 12, "--max-num-batched-tokens", 48, "--block-size", 8,
        "--enable-lora", "--max-loras", 8, "--max-cpu-loras", 32, "--max-lora-rank", 2, "--lora-dir", tmp_path,
        "--served-model-name", "base", "--restart-engine",
    ).wait_ready()  # fmt: skip
    try:
        traffic = Traffic(model, server)
        asyncio.run(traffic.run())
        print(traffic.seen)
        assert traffic.seen["answered"] > 700
        assert min(traffic.seen[n] for n in ("cut", "unloaded", "loaded", "engine down")) > 0
        server.idle()
        assert [m["id"] for m in json.loads(server.get("/v1/models")[1])["data"]] == ["base"]
        lines = server.get("/metrics")[1].splitlines()
        (shown,) = (x for x in lines if x.startswith("vllm:lora_requests_info{"))
        assert 'running_lora_adapters=""' in shown
        assert 'waiting_lora_adapters=""' in shown
        assert server.metric("graphllm_requests_waiting") == 0
    finally:
        assert server.stop() == 0, server.log.read_text()
