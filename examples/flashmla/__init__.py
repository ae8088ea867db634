"""FlashMLA's sparse FP8 decode on sm_90, modelled from its SASS."""
