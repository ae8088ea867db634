import numpy as np

from sparse_mla_verify.gpu_runs.unmapped import tensor_at


def test_a_tensor_is_made_of_an_address_alone():
    data = np.arange(3 * 576, dtype=np.uint32).astype(np.uint8).reshape(3, 576)
    made = tensor_at(data.ctypes.data + 576, 2, 576, None)
    assert np.array_equal(made.numpy(), data[1:])
    assert tensor_at(data.ctypes.data, 2**31 - 1, 576, None).shape == (2**31 - 1, 576)
