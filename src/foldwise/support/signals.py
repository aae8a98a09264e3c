"""SIGTERM as batch systems send it: work ends as it does by Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Terminated(KeyboardInterrupt):
    """Asked to end by SIGTERM."""


@contextmanager
def ended_by_terminate() -> Iterator[None]:
    """Within this, SIGTERM raises ``Terminated``, unless it means something else already."""

    def stop(*_: Any) -> None:
        raise Terminated

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
