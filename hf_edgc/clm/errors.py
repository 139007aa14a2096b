"""One error for everything a user can repair, and how the script ends with it."""

import sys
import textwrap

from hf_edgc.logs import is_main_process

EXIT_CODE = 2
"""What argparse exits with, too."""


class UsageError(ValueError):
    """Something the user passed cannot be used; the message says what, and what would do."""


def report(error: UsageError) -> int:
    """Write the message to stderr, on the main worker only.

    Returns:
        The exit code, the same on every worker.
    """
    if is_main_process():
        message = f"error: {' '.join(str(error).split())}"
        lines = textwrap.wrap(message, width=110, break_on_hyphens=False, break_long_words=False)
        print("\n".join(lines), file=sys.stderr, flush=True)
    return EXIT_CODE
