"""The low-latency schedule: the same stages as the package's own, under the same file names.

What differs, and why:

* Keys are dealt to the CTAs in runs of 8, so that a CTA's row ids don't depend on the count and
  both are loaded at once.
* Products are FP16: bytes are unpacked once and the accumulator stays in the MMA. No separate adds,
  and bits that no assembler's emulation decides.
* 256 threads a CTA, all of them in every stage: QK splits the 576 columns over 4 warps, softmax
  gives a warp two heads and a lane two keys.
* Two CTAs that attend with different heads to the same keys share a gather: each asks for half of
  the rows and the copy engine writes both.
* The next chunk's gather runs under this chunk's arithmetic.
* A CTA's partial leaves as soon as a half of it is done, in the order of its registers, 512 bytes
  an instruction; the row's weights are computed while it travels.
"""
