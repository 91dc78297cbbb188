"""A server for ``reward_model.reward_manager=remote``: any reward function of a file, over HTTP.

    python examples/reward_server/server.py --path examples/gsm8k/reward.py --port 8000

and then ``reward_model.reward_manager=remote reward_model.url=http://HOST:8000/score``. It is a reference for servers
of your own: POST /score takes one response, and answers with a number or an object that has ``score``.
"""

from __future__ import annotations

import argparse
from typing import Any

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from podium.workers.reward.functions import RewardFn, RewardSource


class Sample(BaseModel):
    """What is to be scored, as a reward function gets it."""

    data_source: str
    solution_str: str
    ground_truth: Any = None
    extra_info: dict[str, Any] = {}


def make_app(fn: RewardFn) -> FastAPI:
    """The application; `fn` runs in a thread of its own for each request."""
    app = FastAPI(title="reward")

    @app.post("/score")
    def score(sample: Sample) -> Any:
        return fn(**sample.model_dump())

    @app.get("/health")
    def health() -> str:
        return "ok"

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", help="Python file with the reward function; without it, a built-in reward")
    parser.add_argument("--name", default="compute_score")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    uvicorn.run(
        make_app(RewardSource(args.path, args.name).load()), host=args.host, port=args.port, log_level="warning"
    )


if __name__ == "__main__":
    main()
