"""BF16: rounded to nearest even, as ``cvt.rn.bf16x2.f32`` does it; out of range is infinity.

>>> import numpy as np
>>> encode(np.float32([1.0, 1.00390625, np.nan])).view(np.uint16).tolist()
[16256, 16256, 32767]
"""

from sparse_mla_reference.formats.minifloat import BF16

encode = BF16.encode
encode_pair = BF16.encode_pair
decode = BF16.decode
