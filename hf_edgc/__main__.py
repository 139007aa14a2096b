"""``python -m hf_edgc``, which is how a launcher starts ``hf-edgc probe`` on every worker."""

import sys

from hf_edgc.cli import main

if __name__ == "__main__":
    sys.exit(main())
