"""Every global random state of a process, as plain values that JSON holds."""

import base64
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from podium.utils.device import is_cuda


def random_state() -> dict[str, Any]:
    """The states of python, numpy, torch and, where this process computes on one, its CUDA device."""
    version, words, gauss = random.getstate()
    numpy: Any = np.random.get_state()
    state = {
        "python": [version, list(words), gauss],
        "numpy": [part.tolist() if isinstance(part, np.ndarray) else part for part in numpy],
        "torch": state_text(torch.get_rng_state()),
    }
    if is_cuda():
        state["cuda"] = state_text(torch.cuda.get_rng_state())
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Takes up what `random_state` gave. A CUDA state where there is no CUDA, and the reverse, is left alone."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state_tensor(state["torch"]))
    if is_cuda() and "cuda" in state:
        torch.cuda.set_rng_state(state_tensor(state["cuda"]))


def state_text(state: torch.Tensor) -> str:
    """A generator's state as JSON holds it."""
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def state_tensor(text: str) -> torch.Tensor:
    """What `state_text` was made of."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
