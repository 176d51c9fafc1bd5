"""The HTTP process's end of the wire to a scheduler: two ZeroMQ sockets in a private directory.

This side binds both, the scheduler connects: so the addresses exist before the scheduler is started, and a scheduler that
dies takes nothing with it. Whoever may enter the directory may use the sockets, hence mode 0700.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from sglang.srt.managers import io_struct

_MAX_IPC_PATH = 100  # bytes; the kernel allows 107 for a Unix socket's path, less the names below


class SchedulerLink:
    """Messages out and in, in order. Belongs to the event loop in which `open` was called."""

    def __init__(self) -> None:
        self.to_scheduler = ""  # address where the scheduler pulls
        self.from_scheduler = ""  # and where it pushes
        self._directory: Path | None = None
        self._context: zmq.asyncio.Context | None = None

    def open(self) -> None:
        """Make the directory and bind both sockets. No high-water mark: a lost message would be a request that never ends."""
        self._directory = _private_directory()
        self.to_scheduler, self.from_scheduler = f"ipc://{self._directory}/in", f"ipc://{self._directory}/out"
        self._context = zmq.asyncio.Context(io_threads=1)
        self._push = self._context.socket(zmq.PUSH)
        self._pull = self._context.socket(zmq.PULL)
        for socket, address in ((self._push, self.to_scheduler), (self._pull, self.from_scheduler)):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.bind(address)

    def send(self, message: io_struct.ToScheduler) -> None:
        """Queue a message; never waits, so an abort can be sent while a task is being cancelled."""
        self.send_packed(io_struct.encode(message))

    def send_packed(self, frame: bytes) -> None:
        """The same for a message that was encoded before, by `pack`."""
        if self._context is not None:
            sent = asyncio.ensure_future(self._push.send(frame))
            sent.add_done_callback(_retrieve)

    async def receive(self) -> io_struct.FromScheduler:
        """The next message. Raises msgspec.DecodeError for anything that is not one."""
        return io_struct.decode_from_scheduler(await self._pull.recv())

    def close(self) -> None:
        """Close the sockets and remove the directory. Safe to call twice."""
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None


def pack(message: io_struct.ToScheduler) -> bytes:
    """A message as a frame. Raises ValueError for a value that msgpack cannot hold, wherever in the message it is."""
    try:
        return io_struct.encode(message)
    except (OverflowError, UnicodeEncodeError, RecursionError, TypeError, msgspec.MsgspecError) as error:
        raise ValueError(str(error)) from None


def _private_directory() -> Path:
    """mkdtemp makes it 0700. A long TMPDIR would not leave room for a socket name, so then /tmp is used."""
    directory = Path(tempfile.mkdtemp(prefix="sglang-"))
    if len(str(directory)) > _MAX_IPC_PATH:
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix="sglang-", dir="/tmp"))
    return directory


def _retrieve(sent: asyncio.Future) -> None:
    """A send fails only when the socket is closed under it, and then nobody is left to be told."""
    if not sent.cancelled():
        sent.exception()
