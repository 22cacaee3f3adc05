from array import array

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attend.model import transfer
from attend.model.transfer import HostToDeviceCopy

NUMBERS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9)


@given(
    st.lists(st.tuples(NUMBERS, st.sampled_from([list, lambda values: array("q", values), np.int64])), min_size=1, max_size=7)
)
def test_what_is_put_in_is_read_out(parts):
    h2d_copy = HostToDeviceCopy("cpu")
    indices = [h2d_copy.add(kind(values) if values else array("q")) for values, kind in parts]
    assert [h2d_copy[index].tolist() for index in indices] == [values for values, _ in parts]
    assert {h2d_copy[index].dtype for index in indices} == {torch.int64}


def test_all_parts_go_in_one_copy_and_none_after_it(monkeypatch):
    copies = []
    monkeypatch.setattr(transfer, "to_device", lambda numbers, device: (copies.append((numbers.tolist(), device)), numbers)[1])
    h2d_copy = HostToDeviceCopy("cpu")
    first, second = h2d_copy.add([1, 2]), h2d_copy.add(np.array([[3], [4]]))
    assert copies == []
    assert (h2d_copy[second].tolist(), h2d_copy[first].tolist()) == ([3, 4], [1, 2])
    assert copies == [([1, 2, 3, 4], "cpu")]
    with pytest.raises(RuntimeError, match="started already"):
        h2d_copy.add([5])
