"""At which positions of a prompt the request state is worth keeping.

A later prompt resumes at the deepest snapshot it shares. So a snapshot is taken at the prompt's end (regenerate, n > 1,
equal prompts), where an earlier prompt is known to branch off (the second user of a system prompt leaves it for the
third), and at intervals (for branches not seen yet). The state at a request's end costs nothing: its slot goes to the tree.
"""

from __future__ import annotations

from bisect import bisect_right

from sglang.srt.managers.request import Req


class SnapshotPlanner:
    """Decides positions and chunk ends. Taking and keeping the copies is the page keeper's work."""

    def __init__(self, interval: int, max_snapshots: int, max_running_requests: int, page_size: int):
        self._interval = interval
        self._page_size = page_size
        # Each running request may fill its share of the snapshots, less one for the end of its prompt and one for its own:
        # a long prompt must not push out the snapshots of all others.
        self._max_interior = max(0, max_snapshots // max_running_requests - 2) if max_snapshots else 0
        self._is_off = max_snapshots == 0

    def plan(self, req: Req, branch: int) -> list[int]:
        """Positions to snapshot, ascending, all beyond what `req` has computed at admission.

        `branch`: tokens whose pages the tree had but no state for.
        """
        if self._is_off or req.window_start:  # a replayed window is approximate: nothing of it is kept before the end
            return []
        points = {req.num_prompt}
        if req.restore == "exact" and not req.decoder_start:
            # Approximate modes have no complete windows in the middle of a prompt, or not the same ones.
            points.update(self._interior(req.num_prompt))
            points.add(branch // self._page_size * self._page_size)
        return sorted(p for p in points if req.num_computed < p <= req.num_prompt)

    def _interior(self, num_prompt: int) -> range:
        """Multiples of the interval, or of a multiple of it if the prompt is long."""
        if not self._interval or not self._max_interior:
            return range(0)
        spacing = -(-num_prompt // (self._interval * (self._max_interior + 1))) * self._interval
        return range(spacing, num_prompt, max(spacing, self._interval))

    def chunk_end(self, req: Req, end: int) -> int:
        """Cut a chunk that would run over a snapshot point."""
        index = bisect_right(req.snapshot_points, req.num_computed)
        return min([end, *req.snapshot_points[index : index + 1]])

    def is_due(self, req: Req) -> bool:
        """True if the computed position is one to keep. Points that were passed are forgotten."""
        while req.snapshot_points and req.snapshot_points[0] < req.num_computed:
            req.snapshot_points.pop(0)
        if req.snapshot_points and req.snapshot_points[0] == req.num_computed:
            req.snapshot_points.pop(0)
            return True
        return False
