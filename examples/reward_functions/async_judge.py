"""A language model as judge, over any server with OpenAI's chat API: calls overlap, and a failed one is tried again.

custom_reward_function.path=examples/reward_functions/async_judge.py
custom_reward_function.reward_kwargs.url=http://HOST:8000/v1/chat/completions
custom_reward_function.reward_kwargs.model=NAME
reward_model.max_concurrency=64 reward_model.timeout_s=120
"""

from __future__ import annotations

import os
import re
from typing import Any

import httpx2

_CLIENT = httpx2.AsyncClient(timeout=None)  # reward_model.timeout_s bounds a call
_PROMPT = """How good is the answer, from 0 (useless) to 10 (right and complete)? End with "Rating: N".

Question or reference: {truth}

Answer: {answer}"""


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    url: str,
    model: str,
) -> dict[str, Any]:
    """The judge's rating over 10. A reply without a rating says nothing about the answer: no score, rather than 0."""
    content = _PROMPT.format(truth=ground_truth, answer=solution_str)
    body = {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0.0}
    headers = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}"}
    reply = await _CLIENT.post(url, json=body, headers=headers)
    reply.raise_for_status()
    text = reply.json()["choices"][0]["message"]["content"]
    found = re.findall(r"Rating:\s*(\d+)", text)
    if not found or int(found[-1]) > 10:
        return {"abstain": f"no rating in the judge's reply: {text[-80:]!r}"}
    return {"score": int(found[-1]) / 10}
