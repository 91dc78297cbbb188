"""Scores from an HTTP server (docs/rewards.md has the protocol)."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import httpx2

from podium.utils.errors import UserError

_RETRIED = (408, 425, 429)
_SHOWN = 200


@dataclass(frozen=True)
class RemoteSource:
    """A server that takes one response a request. Its function is async: what calls it bounds time and tries again."""

    url: str
    rate_limit: float | None = None
    """Requests a second; None is no limit."""

    def load(self) -> "RemoteFunction":
        """Nothing is connected yet."""
        return RemoteFunction(self.url, self.rate_limit)

    def __str__(self) -> str:
        return f"at {self.url}"


class RemoteFunction:
    """An async reward function. One process must hold it: the rate limit is its own."""

    def __init__(self, url: str, rate_limit: float | None):
        self._url = url
        self._pause_s = 0.0 if rate_limit is None else 1.0 / rate_limit
        self._next_at = 0.0
        self._client: httpx2.AsyncClient | None = None

    async def admit(self) -> None:
        """Waits for a turn under the rate limit; such a wait is not the response's time."""
        now = time.monotonic()
        at = max(now, self._next_at)
        self._next_at = at + self._pause_s
        if at > now:
            await asyncio.sleep(at - now)

    async def __call__(self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> Any:
        """What the server answers: a number, or an object as a reward function returns.

        Raises:
            UserError: the server says that the request is wrong (4xx); to repeat it would not help.
            Exception: anything else, which may pass.
        """
        if self._client is None:  # it belongs to the event loop that runs now
            unlimited = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
            self._client = httpx2.AsyncClient(timeout=None, limits=unlimited)
        body = {
            "data_source": data_source,
            "solution_str": solution_str,
            "ground_truth": ground_truth,
            "extra_info": extra_info,
        }
        try:
            answer = await self._client.post(self._url, json=body)
        except httpx2.TransportError as error:
            raise ConnectionError(f"{self._url}: {type(error).__name__}: {error}") from error
        if 400 <= answer.status_code < 500 and answer.status_code not in _RETRIED:
            raise UserError(f"{self._url} answered {answer.status_code}: {_head(answer.text)}")
        if answer.status_code != 200:
            raise ConnectionError(f"{self._url} answered {answer.status_code}: {_head(answer.text)}")
        try:
            return answer.json()
        except ValueError:
            raise ValueError(f"{self._url} answered what is no JSON: {_head(answer.text)}") from None


def _head(text: str) -> str:
    return " ".join(text.split())[:_SHOWN]
