"""A server on a real socket, in a thread of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from outpace.serving.app import build_app
from outpace.serving.server import open_socket, url
from outpace.serving.service import Service


@contextmanager
def live(served: Service, **about: Any) -> Iterator[str]:
    """The address of a server of ``served``."""
    listening = open_socket("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(build_app(served), log_config=None, lifespan="off", ws="none", **about))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield url(listening, "127.0.0.1")
    finally:
        server.should_exit = True
        thread.join()
        served.stop()
