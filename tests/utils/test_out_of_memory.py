"""Running out of memory is known by what the allocators really say."""

import pytest
import torch

from podium.utils.out_of_memory import OutOfMemoryError, is_out_of_memory, micro_batch_of, what_was_tried


def test_the_cpu_allocator_is_understood():
    said = r"a micro-batch of 4 rows, 20 tokens \(32 with padding\); tried to allocate"
    with pytest.raises(OutOfMemoryError, match=said), micro_batch_of(lambda: (4, 20, 8)):
        torch.empty(1 << 60, dtype=torch.uint8)


def test_cuda_python_and_a_message_of_ours_are_understood():
    cuda = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of ...")
    assert is_out_of_memory(cuda) and what_was_tried(cuda) == "tried to allocate 20.00 MiB"
    assert is_out_of_memory(MemoryError()) and what_was_tried(MemoryError()) == ""
    assert is_out_of_memory(OutOfMemoryError("x")) and what_was_tried(OutOfMemoryError("x")) == "x"


def test_another_error_passes_as_it_is():
    with pytest.raises(RuntimeError, match=r"^shape$"), micro_batch_of(lambda: (1, 1, 1)):
        raise RuntimeError("shape")
