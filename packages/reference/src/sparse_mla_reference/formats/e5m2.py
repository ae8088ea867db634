"""E5M2 (OCP FP8): infinities 0x7C and 0xFC, NaNs beyond them, saturating converts.

>>> import numpy as np
>>> encode(np.float32([1.0, 61440.0, -1e9, np.nan])).tolist()
[60, 123, 251, 127]
"""

from sparse_mla_reference.formats.minifloat import E5M2

MAX = 57344.0
NAN = 0x7F
encode = E5M2.encode
encode_pair = E5M2.encode_pair
decode = E5M2.decode
