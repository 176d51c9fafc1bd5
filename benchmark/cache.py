"""What the prefix cache and overlap scheduling are worth: ratios, each within one run.

    python benchmark/cache.py [CHECKPOINT] [--json out.json]

- first token of a prompt with a shared prefix of 2,000 tokens, warm against cold
- a chat of 8 sessions x 6 turns, all sessions side by side: hit rate, and total time against cache off
- 16 running requests: time outside the model per step, and throughput with overlap against without
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / ".cache" / "checkpoints" / "demo"
GREEDY = {"temperature": 0.0, "ignore_eos": True}
SESSIONS, TURNS = 8, 6
SYSTEM_TOKENS, USER_TOKENS, ANSWER_TOKENS = 200, 30, 24
RUNNING, NEW_TOKENS = 16, 48


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path, default=DEMO)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    if options.checkpoint == DEMO and not (DEMO / "config.json").is_file():
        subprocess.run([sys.executable, str(ROOT / "tools" / "random_checkpoint.py"), str(DEMO), "--preset", "demo"], check=True)
    path = str(options.checkpoint)
    figures = {"shared prefix": shared_prefix(path), "multi-turn chat": multi_turn(path), "16 running": sixteen_running(path)}
    print(json.dumps(figures, indent=1))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def engine(path: str, **flags: Any) -> Any:
    import sglang

    return sglang.Engine(model_path=path, max_total_tokens=32768, max_running_requests=RUNNING, **flags)


def prompt(seed: int, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(3, 4000), k=tokens)


def shared_prefix(path: str) -> dict[str, float]:
    """Seconds to the first token; the prompt is 2,000 shared tokens and 8 of its own."""
    ratios, cold, warm = [], [], []
    with engine(path) as running:

        def seconds(ids: list[int]) -> float:
            started = time.perf_counter()
            running.generate(input_ids=ids, sampling_params={**GREEDY, "max_new_tokens": 1})
            return time.perf_counter() - started

        seconds(prompt(0, 64))
        for run in range(3):
            head = prompt(100 + run, 2000)
            cold.append(seconds(head + prompt(200 + run, 8)))
            seconds(head + prompt(300 + run, 8))  # the branch is noticed, and a snapshot taken there
            warm.append(seconds(head + prompt(400 + run, 8)))
            ratios.append(warm[-1] / cold[-1])
    return {"cold_s": statistics.median(cold), "warm_s": statistics.median(warm), "warm_over_cold": statistics.median(ratios)}


def multi_turn(path: str) -> dict[str, float]:
    """The same chat with the cache on and off; greedy, so the answers are the same too."""

    def chat(running: Any) -> tuple[float, int, int]:
        system = prompt(1, SYSTEM_TOKENS)

        def session(number: int) -> tuple[int, int]:
            history, cached, total = list(system), 0, 0
            for turn in range(TURNS):
                history += prompt(1000 * number + turn, USER_TOKENS)
                reply = running.generate(input_ids=history, sampling_params={**GREEDY, "max_new_tokens": ANSWER_TOKENS})
                cached += reply["meta_info"]["cached_tokens"]
                total += len(history)
                history += reply["output_ids"]
            return cached, total

        started = time.perf_counter()
        with ThreadPoolExecutor(SESSIONS) as pool:
            counts = list(pool.map(session, range(SESSIONS)))
        return time.perf_counter() - started, sum(c for c, _ in counts), sum(t for _, t in counts)

    with engine(path) as running:
        on, cached, total = chat(running)
    with engine(path, disable_radix_cache=True) as running:
        off, none, _ = chat(running)
    assert none == 0
    return {"hit_rate": cached / total, "prompt_tokens": total, "on_s": on, "off_s": off, "on_over_off": on / off}


def sixteen_running(path: str) -> dict[str, float]:
    """Throughput of 16 requests, and the share of a step that is not the model."""

    def run(**flags: Any) -> tuple[float, float]:
        prompts = [prompt(500 + i, 16) for i in range(RUNNING)]
        with engine(path, disable_radix_cache=True, **flags) as running:
            params = {**GREEDY, "max_new_tokens": NEW_TOKENS}
            running.generate(input_ids=prompts, sampling_params={**GREEDY, "max_new_tokens": 4})
            before = stats(running)
            started = time.perf_counter()
            running.generate(input_ids=prompts, sampling_params=params)
            seconds = time.perf_counter() - started
            inside = stats(running)["forward_seconds"] - before["forward_seconds"]
        return RUNNING * NEW_TOKENS / seconds, 1 - inside / seconds

    pairs = [(run(), run(disable_overlap_schedule=True)) for _ in range(3)]
    return {
        "overlap_tokens_per_s": statistics.median(on[0] for on, _ in pairs),
        "plain_tokens_per_s": statistics.median(off[0] for _, off in pairs),
        "overlap_over_plain": statistics.median(on[0] / off[0] for on, off in pairs),
        "outside_model_share_overlap": statistics.median(on[1] for on, _ in pairs),
        "outside_model_share_plain": statistics.median(off[1] for _, off in pairs),
    }


def stats(running: Any) -> dict[str, Any]:
    return running.get_server_info()["internal_states"][0]["stats"]


if __name__ == "__main__":
    raise SystemExit(main())
