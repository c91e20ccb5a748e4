"""A thread looks again and again, until it is closed."""

import threading

from tpu_embedding.distributed import poller
from tpu_embedding.distributed.poller import Poller


def test_an_error_is_not_the_end(monkeypatch):
    monkeypatch.setattr(poller, "POLL_SECONDS", 0.001)
    looks, is_seen = [], threading.Event()

    def look():
        looks.append(None)
        if len(looks) < 3:
            raise RuntimeError("UNAVAILABLE: the connection is reset")
        is_seen.set()

    thread = Poller("test", look)
    assert is_seen.wait(timeout=30)
    thread.close()
    assert not thread._thread.is_alive()
