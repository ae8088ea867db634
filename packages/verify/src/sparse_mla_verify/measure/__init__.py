"""What a kernel gave, against the reference: bits, units of the last place, derived bounds."""
