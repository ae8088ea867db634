"""`python -m sparse_mla_verify.bench`: the benchmark command."""

import sys

from sparse_mla_verify.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
