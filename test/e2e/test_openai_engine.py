"""The OpenAI routes with the real engine behind them, on a random model: ids, counts and resources, never sense."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import OpenAI

from harness.served import Served, serve, write_demo_checkpoint
from sglang.srt.entrypoints.openai.recipe import ChatConversation, Recipe

IDLE_S = 10.0
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("worker")
    checkpoint = write_demo_checkpoint(directory / "demo")
    with serve(checkpoint, directory / "log", "--served-model-name", "demo", "--enable-cache-report") as worker:
        yield worker


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return Recipe((Path(__file__).parents[1] / "golden/toy_tokenizer/tokenizer.json").read_text())


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def post(served: Served, path: str, **body: Any) -> dict[str, Any]:
    reply = httpx.post(served.url + path, json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def chat(served: Served, **body: Any) -> dict[str, Any]:
    return post(served, "/v1/chat/completions", **{"messages": HI, "max_tokens": 8, "return_token_ids": True, **body})


def test_the_sdk_streams_what_it_gets_whole(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "messages": HI, "max_tokens": 12, "seed": 3, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage is not None and chunks[-1].usage is not None
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens == 12


def test_seeds_decide_on_every_route(served: Served, recipe: Recipe) -> None:
    prompt = recipe.render(ChatConversation(HI)).ids
    sampling = {"temperature": 1.0, "top_p": 1.0, "ignore_eos": True}
    seen = []
    for seed in (0, 1, 2):
        native = [
            post(served, "/generate", input_ids=prompt, sampling_params={**sampling, "max_new_tokens": 8, "sampling_seed": seed})
            for _ in range(2)
        ]
        text = post(served, "/v1/completions", prompt=prompt, max_tokens=8, seed=seed, return_token_ids=True, **sampling)
        answer = chat(served, max_tokens=8, seed=seed, **sampling)
        ids = native[0]["output_ids"]
        assert ids == native[1]["output_ids"] == text["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]
        seen.append(tuple(ids))
    assert len(set(seen)) == 3


def test_a_drawn_seed_is_reported_and_reproduces_the_answer(served: Served) -> None:
    first = chat(served, temperature=1.0)
    again = chat(served, temperature=1.0, seed=first["metadata"]["sampling_seed"])
    assert first["choices"][0]["token_ids"] == again["choices"][0]["token_ids"]


def test_choices_differ_and_the_first_is_that_of_one(served: Served) -> None:
    one = chat(served, seed=9, temperature=1.0, ignore_eos=True)["choices"]
    three = chat(served, seed=9, temperature=1.0, ignore_eos=True, n=3)["choices"]
    assert three[0]["token_ids"] == one[0]["token_ids"]
    assert len({tuple(choice["token_ids"]) for choice in three}) == 3


def test_logprobs_do_not_change_the_answer_and_belong_to_it(served: Served) -> None:
    plain = chat(served, temperature=0)
    told = chat(served, temperature=0, logprobs=True, top_logprobs=3)
    entries = told["choices"][0]["logprobs"]["content"]
    assert plain["choices"][0]["token_ids"] == told["choices"][0]["token_ids"] and len(entries) == 8
    for entry in entries:
        best = entry["top_logprobs"]
        assert [alternative["logprob"] for alternative in best] == sorted((a["logprob"] for a in best), reverse=True)
        assert entry["logprob"] == best[0]["logprob"] <= 0


def test_echo_scores_the_prompt(served: Served) -> None:
    ids = list(range(300, 340))
    scored = post(served, "/v1/completions", prompt=ids, echo=True, logprobs=1, max_tokens=0)
    logprobs = scored["choices"][0]["logprobs"]["token_logprobs"]
    assert len(logprobs) == 40 and logprobs[0] is None and all(value <= 0 for value in logprobs[1:])


def test_thinking_that_uses_up_the_budget(served: Served) -> None:
    on = chat(served, max_tokens=8, thinking={"type": "enabled"}, logit_bias={"1": -100, "4036": -100})
    off = chat(served, max_tokens=8, logit_bias={"1": -100})
    message = on["choices"][0]["message"]
    assert (message["content"], on["choices"][0]["finish_reason"], on["usage"]["completion_tokens"]) == ("", "length", 8)
    assert message["reasoning_content"] and on["usage"]["reasoning_tokens"] == 8
    assert off["choices"][0]["message"]["reasoning_content"] is None and off["choices"][0]["message"]["content"]


def test_thinking_that_uses_up_the_budget_in_the_other_formats(served: Served) -> None:
    never = {"logit_bias": {"1": -100, "4036": -100}}
    message = post(served, "/v1/messages", messages=HI, max_tokens=8, thinking={"type": "enabled", "budget_tokens": 1024}, **never)
    assert ([block["type"] for block in message["content"]], message["stop_reason"]) == (["thinking"], "max_tokens")
    assert message["content"][0]["thinking"] and message["usage"]["output_tokens"] == 8
    response = post(served, "/v1/responses", input="hi", max_output_tokens=8, reasoning={"effort": "high"}, **never)
    assert ([item["type"] for item in response["output"]], response["status"]) == (["reasoning"], "incomplete")
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 8
    off = post(served, "/v1/messages", messages=HI, max_tokens=8, thinking={"type": "disabled"}, **never)
    assert [block["type"] for block in off["content"]] == ["text"]


def test_formats_agree_on_prompt_and_answer(served: Served) -> None:
    sampling = {"seed": 5, "temperature": 1.0, "ignore_eos": True}
    chatted = chat(served, **sampling)
    message = post(served, "/v1/messages", messages=HI, max_tokens=8, **sampling)
    response = post(served, "/v1/responses", input="hi", max_output_tokens=8, **sampling)
    text = chatted["choices"][0]["message"]["content"]
    assert message["content"][0]["text"] == response["output"][0]["content"][0]["text"] == text
    cached = message["usage"]["cache_read_input_tokens"]
    assert message["usage"]["input_tokens"] + cached == response["usage"]["input_tokens"] == chatted["usage"]["prompt_tokens"]


def test_a_forced_stop_string_leaves_no_trace(served: Served, client: OpenAI) -> None:
    # Bias makes a random model say one token for ever: H.
    bias = {"42": 1000}
    reply = chat(served, logit_bias=bias, temperature=0, stop="HHHH")
    assert (reply["choices"][0]["message"]["content"], reply["choices"][0]["matched_stop"]) == ("", "HHHH")
    stream = client.chat.completions.create(model="demo", messages=HI, logit_bias=bias, temperature=0, stop="HHHH", stream=True)  # type: ignore[arg-type, call-overload]
    assert not any(choice.delta.content for chunk in stream for choice in chunk.choices)


def test_cached_tokens_agree_with_the_native_route(served: Served, recipe: Recipe) -> None:
    messages = [{"role": "user", "content": "one two three four five six seven eight nine ten " * 40}]
    prompt = recipe.render(ChatConversation(messages)).ids
    assert len(prompt) > 400
    assert httpx.post(served.url + "/flush_cache?timeout=10", timeout=20).status_code == 200
    cold = chat(served, messages=messages, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"]
    warm = chat(served, messages=messages, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"]
    native = post(served, "/generate", input_ids=prompt, sampling_params={"max_new_tokens": 1})["meta_info"]["cached_tokens"]
    assert cold == 0 and warm > 0.9 * len(prompt) and warm == native


def test_prompt_and_limit_beyond_the_context(served: Served) -> None:
    (card,) = httpx.get(served.url + "/v1/models", timeout=10).json()["data"]
    limit = card["max_model_len"]
    ids = [5] * 1500
    for path, prompt in (("/v1/chat/completions", {"messages": HI, "input_ids": ids}), ("/v1/completions", {"prompt": ids})):
        refused = httpx.post(served.url + path, json={**prompt, "max_tokens": limit}, timeout=30)
        assert refused.status_code == 400
        assert all(str(number) in refused.json()["error"]["message"] for number in (limit, limit + 1500, 1500))


def test_many_at_once_get_what_they_get_alone(served: Served) -> None:
    def ask(number: int) -> list[int]:
        return chat(served, messages=[{"role": "user", "content": f"number {number}"}], seed=number, temperature=1.0)["choices"][0][
            "token_ids"
        ]

    alone = [ask(number) for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(6))) == alone


PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 4000},
    "/v1/completions": {"prompt": "hi", "max_tokens": 4000},
    "/v1/messages": {"messages": HI, "max_tokens": 4000},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4000},
}


@pytest.mark.parametrize("path", PROMPTS)
def test_a_client_that_leaves_frees_its_request(served: Served, path: str) -> None:
    body = {**PROMPTS[path], "ignore_eos": True, "stream": True, "logit_bias": {"42": 1000}}
    with httpx.stream("POST", served.url + path, json=body, timeout=30) as stream:
        lines = stream.iter_lines()  # kept: httpx closes the stream with its iterator
        next(lines)
        wait_until(served, running=1)
    wait_until(served, running=0)


def test_an_idle_worker_uses_no_cpu(served: Served) -> None:
    chat(served)
    wait_until(served, running=0)
    time.sleep(0.5)  # what a request leaves to do after its end
    worker = psutil.Process(served.process.pid)
    processes = [worker, *worker.children(recursive=True)]
    assert len(processes) >= 2
    before = cpu_seconds(processes)
    time.sleep(IDLE_S)
    assert cpu_seconds(processes) - before < 0.05 * IDLE_S


def cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def wait_until(served: Served, *, running: int) -> None:
    deadline = time.monotonic() + 2
    while served.running_requests() != running:
        assert time.monotonic() < deadline, f"after 2 s there are {served.running_requests()} requests, not {running}"
        time.sleep(0.02)
