"""The low-latency schedule: the same stages as the package's own, under the same file names.

What differs, and why:

* Keys are dealt to the CTAs in runs of 8, so that a CTA's row ids don't depend on the count and
  both are loaded at once.
* Products are FP16: bytes are unpacked once and the accumulator stays in the MMA. No separate adds,
  and bits that no assembler's emulation decides.
* A CTA has 32 heads where 16 would make more clusters than run at once: what is unpacked of a key
  then serves twice as many products.
* Eight warps multiply and four copy, which lend them their registers. Each CTA of a cluster copies
  a share of the query to all of them; later chunks of keys arrive while earlier ones are
  multiplied.
* Where each CTA has one chunk, P is exchanged (``exchange``) and no partial has to travel: a CTA
  sums over all keys in the columns that it owns.
* Where it has more (``partial``), a chunk's PV and the next chunk's softmax are one run of
  instructions, of which neither waits for the other. The partials go to their owners at the end.

Both ways round at the same places in the same order: which one a row takes changes no bit.
"""
