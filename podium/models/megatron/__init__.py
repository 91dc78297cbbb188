"""Models of megatron-core."""

import warnings

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
