"""The subscriber of docs/serving.md, as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

from graphllm.config.cache.kv_events import KVEventsConfig
from graphllm.engine.events.event_encoder import EventEncoder, described
from graphllm.engine.events.records import Removed
from graphllm.engine.events.zmq_publisher import ZmqPublisher
from graphllm.program.schema import CacheGroup, CacheLayout

GUIDE = Path(__file__).parents[3] / "docs" / "serving.md"


def test_it_sees_what_was_before_and_what_comes(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    assert len(code.splitlines()) < 20
    config = {"enable_kv_cache_events": True, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}
    groups = described(CacheLayout((CacheGroup("full", 0, 4),), 9), 4)
    publisher = ZmqPublisher(KVEventsConfig.read(config | {"topic": "kv-events"}), EventEncoder(groups, 0).encode)
    for port, address in ((5557, publisher.config.endpoint), (5657, publisher.config.replay_endpoint)):
        code = code.replace(f"tcp://127.0.0.1:{port}", str(address))
    script = tmp_path / "subscriber.py"
    script.write_text(code)

    def publish() -> None:
        publisher.publish([Removed(0, [bytes(31) + b"\x07"], "GPU")])

    done = threading.Event()

    def go_on() -> None:  # nobody knows from when on a subscriber is heard
        while not done.wait(0.01):
            publish()

    for _ in range(3):
        publish()
    going_on = threading.Thread(target=go_on)
    with subprocess.Popen([sys.executable, "-u", script], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        before = [running.stdout.readline() for _ in range(3)]
        going_on.start()
        live = [running.stdout.readline() for _ in range(5)]
        done.set()
        going_on.join()
        running.kill()
    assert before == [f"{number} 0 BlockRemoved [7] None\n" for number in range(3)]
    first = int(live[0].split()[0])
    assert first >= 3
    assert live == [f"{number} 0 BlockRemoved [7] None\n" for number in range(first, first + 5)]
    publisher.close()
