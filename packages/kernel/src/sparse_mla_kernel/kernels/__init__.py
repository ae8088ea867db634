"""The kernels, a folder each; the steps of a row have the same file names in every decode."""
