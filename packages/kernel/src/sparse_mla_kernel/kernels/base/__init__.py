"""The base schedule: E4M3 products, one cluster for each 16 heads of a row; push mode too."""
