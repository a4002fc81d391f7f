"""Ports for the rendezvous of ranks that are about to start."""

from __future__ import annotations

import random
import socket

PORTS = range(15000, 30000)
"""Below the range that kernels hand to outgoing connections (32768 and more on Linux, 49152 and more elsewhere): a port
from there may be taken between this process's look and the ranks' start."""

_given: set[int] = set()


def free_port() -> int:
    """A TCP port of this machine that nobody listens on, and that this process has not given before.

    Raises:
        RuntimeError: there is none.
    """
    # Not the module's own generator: a seeded one would give several processes the same ports.
    candidates = [port for port in PORTS if port not in _given]
    random.SystemRandom().shuffle(candidates)
    for port in candidates:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given.add(port)
        return port
    raise RuntimeError(f"no free TCP port in {PORTS.start} to {PORTS.stop - 1}: end what listens there")
