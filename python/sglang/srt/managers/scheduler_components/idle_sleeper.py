"""Sleeping while there is nothing to do, and noticing that nobody is left to work for."""

from __future__ import annotations

import logging
import os
import threading
import time

import zmq

from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import Message

logger = logging.getLogger(__name__)

PARENT_CHECK_S = 1.0
"""Bounds how long a scheduler outlives an HTTP process that died without a word."""


class Inbox:
    """Messages from the HTTP process. Sleeping in poll costs nothing and ends the moment a message arrives."""

    def __init__(self, socket: zmq.Socket):
        self._socket = socket

    def receive(self, timeout_s: float) -> list[Message]:
        """All messages that are there; if none, wait up to `timeout_s` for the first. May be empty.

        Raises msgspec.DecodeError for a message that is not one of ours.
        """
        if timeout_s > 0:
            self._socket.poll(int(timeout_s * 1000))
        messages: list[Message] = []
        try:
            while True:
                messages.append(io_struct.decode_to_scheduler(self._socket.recv(zmq.NOBLOCK)))
        except zmq.Again:
            return messages


def end_with_parent(parent_pid: int) -> None:
    """End this process within a second or so after its parent, whatever it is doing. (Linux can signal a parent's death, but
    means the thread that started us, which may end long before its process.)"""

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(PARENT_CHECK_S)
        logger.warning("process %d, which started this one, has ended; ending too", parent_pid)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
