"""What claims are decided from, and the files that keep it: recordings of GPU runs."""
