"""A tokenizer manager and its scheduler process as one thing with one life. The HTTP server and the offline engine both own
an `EngineCore`.

    EngineCore(args)     check flags and checkpoint, load the tokenizer: everything that can be refused within a second or two
    await start()        open the sockets, start the scheduler process
    await wait_ready()   until it has loaded and produced a token
    await stop()         drain, end the process, remove the sockets

If the process ends by itself, every running request fails at once and `died` is set; what to do then is the owner's choice.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import sglang
from sglang.srt.entrypoints.native_routes import generate_one_token
from sglang.srt.errors import ConfigError, EngineFailed, ServiceError
from sglang.srt.kernels.cpu_environment import set_cpu_environment
from sglang.srt.managers.model_info import ModelInfo
from sglang.srt.managers.scheduler_link import SchedulerLink
from sglang.srt.managers.tokenizer import Tokenizer
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.models.deepseek_v41.checkpoint_files import check_checkpoint
from sglang.srt.models.deepseek_v41.config import load_config
from sglang.srt.server_args import ServerArgs, validate

logger = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 5.0
"""How long the scheduler process may take to exit once nothing runs; then it is killed."""
WARMUP_TIMEOUT_S = 120.0
LAST_WORDS_S = 0.5
"""After the process's exit, how long its last message may take to arrive."""

SCHEDULER_COMMAND = [sys.executable, "-m", "sglang.srt.entrypoints.scheduler_child"]


class EngineCore:
    """See the module's docstring. `start` and everything after it belong to one event loop."""

    def __init__(self, args: ServerArgs, *, command: list[str] | None = None):
        """Raises ConfigError, one line, for whatever can be seen without loading the model.

        `command` starts another scheduler instead; the placeholders {in_addr} and {out_addr} are filled in.
        """
        self.args = validate(args)
        model = read_model_info(args)
        tokenizer = Tokenizer.load(args.resolved_tokenizer_path, args.model_path)
        check_vocabulary(tokenizer, model)
        self.manager = TokenizerManager(args, tokenizer, model, SchedulerLink())
        self.died = asyncio.Event()
        self._command = command or SCHEDULER_COMMAND
        self._process: subprocess.Popen[bytes] | None = None
        self._exited = asyncio.Event()
        self._is_stopping = False

    async def start(self) -> None:
        """Start the scheduler process."""
        self.manager.start()
        link = self.manager.link
        self._process = subprocess.Popen(
            [part.format(in_addr=link.to_scheduler, out_addr=link.from_scheduler) for part in self._command],
            stdin=subprocess.PIPE,
            env=child_environment(),
            process_group=0,  # a Ctrl-C at the terminal is for this process, which then ends that one in order
        )
        order = {
            "args": dataclasses.asdict(self.args),
            "in_addr": link.to_scheduler,
            "out_addr": link.from_scheduler,
            "parent_pid": os.getpid(),
        }
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:  # it ended at once: the watcher reports that
            stdin.write(json.dumps(order).encode())
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._watch, args=(self._process, loop), name="scheduler watch", daemon=True).start()

    @property
    def scheduler_pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def wait_ready(self) -> None:
        """Raises ConfigError for what only loading could show, EngineFailed if the scheduler ended or took too long."""
        try:
            await self.manager.wait_ready(self.args.startup_timeout_s)
        except TimeoutError:
            raise EngineFailed(f"the model was not loaded within {self.args.startup_timeout_s:g} s (--startup-timeout-s)") from None
        if not self.args.skip_server_warmup:
            try:
                async with asyncio.timeout(WARMUP_TIMEOUT_S):
                    await generate_one_token(self.manager, "WARMUP")
            except (ServiceError, TimeoutError) as error:
                raise EngineFailed(f"the first token failed: {error or 'it took too long'}") from None
        self.manager.mark_warm()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, let running ones finish for so long, then abort them."""
        self.manager.begin_drain()
        if not await self.manager.wait_idle(timeout_s):
            logger.warning("aborting %d requests that did not finish within %g s", self.manager.num_sequences, timeout_s)
            self.manager.abort(abort_all=True)
            await self.manager.wait_idle(EXIT_TIMEOUT_S)

    async def stop(self) -> None:
        """End the scheduler process, by request and then by force, and close the sockets."""
        self._is_stopping = True
        process = self._process
        if process is not None and process.poll() is None:
            self.manager.shut_down_scheduler()
            for end, wait_s in ((None, EXIT_TIMEOUT_S if self.manager.is_alive else 0.0), (process.terminate, 1.0), (process.kill, None)):
                if end is not None:
                    end()
                if await self._has_exited(wait_s):
                    break
        await self.manager.close()

    async def _has_exited(self, timeout_s: float | None) -> bool:
        """Wait for the process's end. No thread pool: there is none any more when the interpreter exits."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._exited.wait()
        except TimeoutError:
            return False
        return True

    def _watch(self, process: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop) -> None:
        """In a thread of its own, because no way to wait for a child works in every loop and every thread."""
        code = process.wait()
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody is left to be told
            loop.call_soon_threadsafe(self._on_exit, code)

    def _on_exit(self, code: int) -> None:
        self._exited.set()
        if self._is_stopping:
            return
        # The process may have said why before it ended; that message can still be on its way.
        delay = LAST_WORDS_S if code > 0 else 0.0
        asyncio.get_running_loop().call_later(delay, self._report_death, code)

    def _report_death(self, code: int) -> None:
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        self.manager.fail(f"the scheduler process {how}")
        self.died.set()


def read_model_info(args: ServerArgs) -> ModelInfo:
    """Check config.json and the headers of all shards, without torch. Raises ConfigError."""
    config = load_config(args.model_path, args.model_override)
    check_checkpoint(args.model_path, config)
    most = config.max_position_embeddings
    context_length = most if args.context_length is None else args.context_length
    if context_length > most:  # here, before the scheduler loads weights only to say the same
        raise ConfigError(f"--context-length {context_length} exceeds the model's max_position_embeddings {most}")
    return ModelInfo(
        vocab_size=config.vocab_size,
        context_length=context_length,
        architectures=["DeepseekV41ForCausalLM"],
        has_vision=config.vision is not None,
    )


def check_vocabulary(tokenizer: Tokenizer, model: ModelInfo) -> None:
    """A tokenizer with more ids than the model has rows belongs to another model. Raises ConfigError."""
    if tokenizer.vocab_size > model.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} ids, but the model's vocabulary is {model.vocab_size}; "
            "pass the --tokenizer-path that belongs to this checkpoint"
        )


def child_environment() -> dict[str, str]:
    """This process's environment, with what CPU libraries must find before torch is imported, and a way to this package."""
    environment = dict(os.environ)
    set_cpu_environment(environment)  # the number of threads is the model runner's decision
    source = str(Path(sglang.__file__).parent.parent)
    paths = [source, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return environment
