"""Models of megatron-core."""

import importlib.util
import warnings

from podium.utils.errors import UserError

# Each rank would say, on import and in the first step, what is so by design or in megatron-core's own calls.
for _message in (
    "(Transformer Engine and )?Apex (is|are) not installed",
    "full scope is deprecated",
    "When using .* it is recommended to set the environment variable CUDA_DEVICE_MAX_CONNECTIONS",
    "`sequence_parallel` is set to `True`, but tensor model parallel size is 1",
    r"`torch\.distributed\.\w+` is deprecated",
    "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed",
):
    warnings.filterwarnings("ignore", _message)


def require_megatron() -> None:
    """Raises `UserError` where megatron-core is not installed."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise UserError("strategy=megatron needs megatron-core: pip install 'podium[megatron]'")
