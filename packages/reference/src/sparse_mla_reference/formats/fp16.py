"""FP16: rounded to nearest even, as ``cvt.rn.f16x2.f32`` does it; out of range is infinity.

>>> import numpy as np
>>> encode(np.float32([1.0, 65520.0, np.nan])).view(np.uint16).tolist()
[15360, 31744, 32767]
"""

from sparse_mla_reference.formats.minifloat import FP16

encode = FP16.encode
encode_pair = FP16.encode_pair
decode = FP16.decode
