"""Arrays and tensors over the same memory."""

import numpy as np
import pytest
import torch

from prefold.worker.torch.tensors import BFLOAT16, array_of, tensor_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_tensor_and_its_array_share_memory_and_strides(dtype):
    tensor = torch.arange(24).to(dtype).view(4, 6)[1:, ::2]
    array = array_of(tensor)
    assert array.dtype == (BFLOAT16 if dtype == torch.bfloat16 else np.dtype(str(dtype).removeprefix("torch.")))
    assert array.tolist() == tensor.tolist() and array.ctypes.data == tensor.data_ptr()
    again = tensor_of(array)
    assert again.data_ptr() == tensor.data_ptr() and again.dtype == dtype and again.stride() == tensor.stride()
    again[0, 0] = 7
    assert tensor[0, 0] == 7
