"""E4M3 (OCP FP8, the ``fn`` variant): no infinities, the NaNs 0x7F and 0xFF, saturating converts.

>>> import numpy as np
>>> encode(np.float32([1.0, 464.0, -1e9, np.nan])).tolist()
[56, 126, 254, 127]
>>> hex(encode_pair(np.float32(1.0), np.float32(2.0)))
'0x3840'
"""

from sparse_mla_reference.formats.minifloat import E4M3

MAX = 448.0
NAN = 0x7F
encode = E4M3.encode
encode_pair = E4M3.encode_pair
decode = E4M3.decode
as_bytes = E4M3.codes
