"""`python -m sparse_mla_verify`: the audit command."""

import sys

from sparse_mla_verify.audit.command import main

if __name__ == "__main__":
    sys.exit(main())
