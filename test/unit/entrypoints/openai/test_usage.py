from __future__ import annotations

from sglang.srt.entrypoints.openai.usage import ChoiceUsage, ReasoningCounter, usage_of


def test_n_choices_share_one_prompt_count_and_the_first_reports_the_cache() -> None:
    choices = [ChoiceUsage(prompt=p, prompt_tokens=5, cached_tokens=c, completion_tokens=2) for p, c in ((0, 1), (0, 4), (1, 0), (1, 4))]
    usage = usage_of(choices, report_cache=True)
    assert usage["prompt_tokens"] == 10 and usage["completion_tokens"] == 8 and usage["total_tokens"] == 18
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}


def test_streams_leave_out_what_is_null() -> None:
    choices = [ChoiceUsage(prompt_tokens=1, completion_tokens=1)]
    assert usage_of(choices, report_cache=False)["completion_tokens_details"] is None
    assert set(usage_of(choices, report_cache=False, streamed=True)) == {
        "prompt_tokens",
        "total_tokens",
        "completion_tokens",
        "reasoning_tokens",
    }


def test_reasoning_is_counted_up_to_and_including_its_end() -> None:
    counter = ReasoningCounter(9, thinking=True)
    counter.take([1, 2])
    counter.take([9, 3])
    counter.take([9])
    assert counter.count == 3


def test_reasoning_that_never_ends_is_all_of_it_and_none_without_thinking() -> None:
    counter = ReasoningCounter(9, thinking=True)
    counter.take([1, 2])
    off = ReasoningCounter(9, thinking=False)
    off.take([1, 9])
    assert (counter.count, off.count) == (2, 0)
