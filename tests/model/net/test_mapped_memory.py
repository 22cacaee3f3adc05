"""Tensors in mapped memory take their pages when they are written to."""

import torch

from attend.model.net.mapped_memory import bytes_in_memory, large_pages


def test_a_page_is_in_memory_once_it_was_written_to():
    numbers = large_pages(32 << 20, torch.uint8)
    start = numbers.data_ptr()
    assert bytes_in_memory(start, numbers.nbytes) == 0
    numbers[: 8 << 20] = 1
    assert 8 << 20 <= bytes_in_memory(start, numbers.nbytes) <= 12 << 20
