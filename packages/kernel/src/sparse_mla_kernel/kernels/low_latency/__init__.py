"""The low-latency schedules: the stages of the base schedule, under the same file names.

These things differ from the base schedule, for these reasons:

* Keys are dealt to the CTAs in runs of 8, so that a CTA's row ids don't depend on the count and
  both are loaded at once.
* Products are FP16. The bytes are unpacked once, and the accumulator stays in the MMA: there are no
  separate adds, and the bits don't depend on how an assembler emulates an instruction.
* A CTA has 32 heads where CTAs with 16 would make more clusters than can run at once. Each
  unpacked key then serves twice as many products.
* Eight warps multiply and four warps copy. The copying warps lend their registers to the others.
  Each CTA of a cluster copies a share of the query to all of them. Later chunks of keys arrive
  while earlier ones are multiplied.
* Where each CTA has one chunk, the CTAs exchange P (``exchange``) and no partial has to travel.
  Each CTA sums over all keys in the columns that it owns.
* Where a CTA has more chunks (``partial``), PV of a chunk and the softmax of the next chunk are one
  run of instructions, in which neither waits for the other. The partials go to their owners at the
  end.

The two ways round at the same places and in the same order: a row has the same bits in both.
"""
