"""Texts under load, with the deterministic mode as the judge: conversations over few blocks with host memory and a disk
behind them, in engines that are killed at random, are bit for bit those of an engine without tiers."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from graphllm.embedded import HYBRID_DIR, MODEL_DIR
from tests.artifacts import artifact_of
from tests.engine.test_deterministic import SETTINGS
from tests.engine.tiers.talker import open_small, serve
from tests.tiers import thorough

VOCABULARY = 4096
MODELS = {"embedded": MODEL_DIR, "hybrid": HYBRID_DIR}


def asked(seed: int, count: int) -> list[dict[str, Any]]:
    """Prompts that go on from each other's beginnings, greedy and sampled."""
    draw = random.Random(seed)
    texts = [[draw.randrange(3, VOCABULARY) for _ in range(draw.choice((16, 40)))] for _ in range(6)]
    made = []
    for number in range(count):
        at = draw.randrange(len(texts))
        texts[at] = [*texts[at], *(draw.randrange(3, VOCABULARY) for _ in range(draw.randint(1, 40)))]
        if len(texts[at]) > 220:
            texts[at] = texts[draw.randrange(len(texts))][: draw.choice((16, 48, 100))]
        params = {"max_tokens": draw.randint(1, 16), "ignore_eos": True, "seed": number}
        params |= {"temperature": 0.0} if draw.random() < 0.5 else {"temperature": 0.9, "top_p": 0.9}
        abort = draw.randint(1, 4) if draw.random() < 0.15 else 0
        made.append({"id": str(number), "prompt": texts[at], "params": params, "abort": abort})
    return made


def talk(
    settings: dict[str, Any], requests: list[dict[str, Any]], most: int | None
) -> tuple[dict[str, list[int]], Any]:
    """What a process answers; it is killed after so many answers. Then what came from each tier, if it was not."""
    command = [sys.executable, "-m", "tests.engine.tiers.talker"]
    found: dict[str, list[int]] = {}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(settings) + "\n" + json.dumps(requests) + "\n")
        process.stdin.flush()
        assert process.stdout.readline() == "ready\n"
        for line in process.stdout:
            answer = json.loads(line)
            if isinstance(answer, dict):
                process.wait()
                return found, answer
            found[answer[0]] = answer[1]
            if len(found) == most:
                process.kill()
    return found, {}


@pytest.mark.parametrize(
    ("model", "count", "kills"),
    [
        thorough("embedded", 150, 3),
        thorough("hybrid", 100, 2),
        pytest.param("embedded", 2000, 12, marks=pytest.mark.slow),
        pytest.param("hybrid", 2000, 12, marks=pytest.mark.slow),
    ],
)
def test_texts_are_those_without_tiers(model: str, count: int, kills: int, tmp_path: Path) -> None:
    place = artifact_of(MODELS[model], **SETTINGS, dtype="bfloat16")
    requests = asked(count, count)
    reference = open_small(str(MODELS[model]), str(place), 400, None, 0)
    whole = [{**one, "abort": 0} for one in requests]
    expected = {id: tokens for id, tokens, _ in serve(reference, whole, 1)}
    reference.close()
    settings = {"model": str(MODELS[model]), "place": str(place), "pages": 40, "disk": str(tmp_path), "host": 16 << 20}
    draw, found, hits = random.Random(1), dict[str, list[int]](), Counter[str]()
    for number in range(kills + 1):
        left = [one for one in requests if one["id"] not in found]
        most = None if number == kills else draw.randint(1, max(1, len(left) // (kills + 1 - number)))
        new, tiers = talk(settings, left, most)
        found |= new
        hits.update(tiers)
    aborted = {one["id"] for one in requests if one["abort"]}
    assert found.keys() == expected.keys()
    for id, tokens in found.items():
        assert tokens == (expected[id][: len(tokens)] if id in aborted else expected[id]), id
    assert hits["host"] > 0
    assert hits["disk"] > 0
