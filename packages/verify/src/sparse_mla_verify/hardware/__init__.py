"""The reference's models against the GPU itself, exhaustively where that is possible.

    sparse-mla-audit hardware --out FILE.json [--only GROUP,...] [--budget SECONDS]

Needs one Hopper GPU (sm_90); under ten minutes on 16 cores. Groups:

* ``mufu``: ``ex2``, ``lg2``, ``rcp``, ``rsqrt`` (``.approx.ftz.f32``), all 2^32 inputs;
* ``convert``: float32 to E4M3, E5M2, BF16 and FP16, all 2^32 inputs, both halves of a pair;
* ``arithmetic``: libdevice's ``log2f`` on all 2^32 inputs; ``add``, ``mul``, ``fma`` and ``div``
  on 10^8 operands of eight families each;
* ``mma``: every ``SM90_*`` tensor-core model, 10^8 outputs of fourteen families each.

Encodings are compared, NaN and the signs of zeros included. Files in the order of the data:
``sweeps``, ``arithmetic`` and ``instructions`` name what is compared, ``families`` makes the inputs
of tensor cores, ``hashing`` condenses 2^23 results to a word, ``kernels`` and ``device`` are the
GPU's side, ``session`` compares, ``record`` keeps.
"""
