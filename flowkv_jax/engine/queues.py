"""Where live requests stand: the scheduler's record of each, ordered queues, and deadlines."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from operator import attrgetter

from flowkv_jax.engine.stop_rules import StopRule
from flowkv_jax.request import Request, RequestStatus

Order = tuple[int, float, int]
"""(priority, or 0 under fcfs; arrival_s; number of the `add`). Unique; lower runs first."""


@dataclass(eq=False, slots=True)
class LiveRequest:
    """A request from `add` until it ends.

    Attributes:
        prefilling: known tokens are still to be computed before the next one can be sampled.
    """

    request: Request
    order: Order
    stop_rule: StopRule
    prefilling: bool = True


_order_of = attrgetter("order")


class RequestQueue:
    """Live requests by ascending `order`. `items` is for reading; only the methods change it."""

    __slots__ = ("items", "num_prompt_tokens")

    def __init__(self) -> None:
        self.items: list[LiveRequest] = []
        self.num_prompt_tokens = 0

    def __len__(self) -> int:
        return len(self.items)

    def insert(self, live: LiveRequest) -> None:
        insort(self.items, live, key=_order_of)
        self.num_prompt_tokens += live.request.num_prompt_tokens

    def remove(self, live: LiveRequest) -> None:
        """Raises RuntimeError if `live` is not here."""
        index = bisect_left(self.items, live.order, key=_order_of)
        if index == len(self.items) or self.items[index] is not live:
            raise RuntimeError(f"{live.request.request_id} is not in the queue it should be in")
        del self.items[index]
        self.num_prompt_tokens -= live.request.num_prompt_tokens


class LiveRequests:
    """All live requests, each in the one queue that its status and phase say."""

    def __init__(self) -> None:
        self.waiting = RequestQueue()
        self.swapped = RequestQueue()
        self.sending = RequestQueue()
        self.receiving = RequestQueue()
        self.prefilling = RequestQueue()
        self.decoding = RequestQueue()
        self._by_id: dict[str, LiveRequest] = {}
        self._of_status = {
            RequestStatus.WAITING: self.waiting,
            RequestStatus.SWAPPED: self.swapped,
            RequestStatus.SENDING: self.sending,
            RequestStatus.RECEIVING: self.receiving,
        }

    def __len__(self) -> int:
        return len(self._by_id)

    def __getitem__(self, request_id: str) -> LiveRequest:
        return self._by_id[request_id]

    def get(self, request_id: str) -> LiveRequest | None:
        return self._by_id.get(request_id)

    def all(self) -> list[LiveRequest]:
        return list(self._by_id.values())

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def last_running(self) -> LiveRequest:
        """The running request that is last in order."""
        last = [queue.items[-1] for queue in (self.prefilling, self.decoding) if queue.items]
        return max(last, key=_order_of)

    def add(self, live: LiveRequest) -> None:
        """A new request, WAITING."""
        self.waiting.insert(live)
        self._by_id[live.request.request_id] = live

    def move(self, live: LiveRequest, status: RequestStatus) -> None:
        """Change a request's status and queue. FINISHED requests leave."""
        self._queue_of(live).remove(live)
        live.request.move_to(status)
        if status is RequestStatus.FINISHED:
            del self._by_id[live.request.request_id]
        else:
            self._queue_of(live).insert(live)

    def set_prefilling(self, live: LiveRequest, prefilling: bool) -> None:
        """Change a running request's phase and queue."""
        self._queue_of(live).remove(live)
        live.prefilling = prefilling
        self._queue_of(live).insert(live)

    def _queue_of(self, live: LiveRequest) -> RequestQueue:
        status = live.request.status
        if status is RequestStatus.RUNNING:
            return self.prefilling if live.prefilling else self.decoding
        return self._of_status[status]


class DeadlineHeap:
    """Deadlines of requests, soonest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []

    def push(self, request: Request, number: int, num_live: int) -> None:
        """Watch a request that has a deadline; `num_live` bounds how many ended ones are kept."""
        if request.deadline_s is None:
            return
        if len(self._heap) > 64 + 2 * num_live:
            self._heap = [item for item in self._heap if not item[2].is_finished]
            heapify(self._heap)
        heappush(self._heap, (request.deadline_s, number, request))

    @property
    def next_s(self) -> float | None:
        """No request expires before it; None if none ever will."""
        while self._heap and self._heap[0][2].is_finished:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_expired(self, now_s: float) -> list[Request]:
        """Requests that have not ended and whose deadline is not after `now_s`."""
        expired: list[Request] = []
        while self._heap and self._heap[0][0] <= now_s:
            request = heappop(self._heap)[2]
            if not request.is_finished:
                expired.append(request)
        return expired
