"""One ragged batch: the only input of the forward path (docs/life-of-a-request.md, step "forward").

There is no prefill and no decode here. Each request has tokens whose KV exists (`prefix_lens`) and tokens that this
forward computes (`extend_lens`): a decode step has one, a verification 1 + γ, a prefill chunk many. Rows of one
request are consecutive and in position order.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

FUTURE_TOKEN = -1
"""An input id that the step in flight is about to sample; the model runner fills it in from the request's state slot."""

NO_TOKEN = -1
"""In `history`: before the start of the sequence."""


@dataclass(slots=True)
class ForwardBatch:
    """R requests, T rows in all.

    `page_tables[r, i]` is the page that holds tokens [i * page_size, (i + 1) * page_size) of request r; entries beyond the
    request's own pages are 0 and never read.
    """

    input_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T], absolute
    row_request: torch.Tensor  # int64 [T], index of the row's request in this batch
    prefix_lens: list[int]  # [R] tokens computed before
    extend_lens: list[int]  # [R] tokens computed now, >= 1
    page_tables: torch.Tensor  # int64 [R, max_pages]
    state_slots: torch.Tensor  # int64 [R], slot of each request in the StatePool
    history: torch.Tensor  # int64 [R, engram_max_ngram_size - 1], ids before the first row, newest first; NO_TOKEN before 0
    output_rows: torch.Tensor  # int64 [n_out], rows whose final hidden state is wanted, ascending
    window_start: list[int]  # [R] first position whose window latents exist (0 unless restored by bounded replay)
    decoder_start: list[int]  # [R] first position the decoder half computes (0 unless prefill truncation is on)
    kv_start: list[int]  # [R] first position whose global KV does not exist yet; replayed rows below write none (bounded replay)

    @property
    def num_requests(self) -> int:
        return len(self.extend_lens)

    @property
    def num_rows(self) -> int:
        return self.input_ids.shape[0]

    def to(self, device: torch.device) -> ForwardBatch:
        """The same batch with its tensors on `device`; itself if they are there."""
        if self.input_ids.device == device:
            return self
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        values = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in values.items()}
        return ForwardBatch(**values)

    @staticmethod
    def build(
        *,
        tokens: list[list[int]],
        prefix_lens: list[int],
        pages: list[list[int]],
        state_slots: list[int],
        history: list[list[int]],
        output_rows: list[int] | None = None,
        window_start: list[int] | None = None,
        decoder_start: list[int] | None = None,
        kv_start: list[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> ForwardBatch:
        """From per-request lists. `output_rows` defaults to the last row of every request."""
        extend_lens = [len(ids) for ids in tokens]
        num_requests = len(tokens)
        width = max(len(p) for p in pages)
        flat_ids = [i for ids in tokens for i in ids]
        positions = [p for start, n in zip(prefix_lens, extend_lens) for p in range(start, start + n)]
        row_request = [r for r, n in enumerate(extend_lens) for _ in range(n)]
        if output_rows is None:
            output_rows, end = [], 0
            for n in extend_lens:
                end += n
                output_rows.append(end - 1)

        def i64(values: list) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        return ForwardBatch(
            input_ids=i64(flat_ids),
            positions=i64(positions),
            row_request=i64(row_request),
            prefix_lens=prefix_lens,
            extend_lens=extend_lens,
            page_tables=i64([p + [0] * (width - len(p)) for p in pages]),
            state_slots=i64(state_slots),
            history=i64(history).view(num_requests, -1),
            output_rows=i64(output_rows),
            window_start=window_start or [0] * num_requests,
            decoder_start=decoder_start or [0] * num_requests,
            kv_start=kv_start or [0] * num_requests,
        )
