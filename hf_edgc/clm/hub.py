"""Names of models, tokenizers and data sets that cannot be loaded: say why, and what works without a network."""

from collections.abc import Iterator
from contextlib import contextmanager

from hf_edgc.clm.errors import UsageError


@contextmanager
def loading(option: str, name: str, repository: str = "model") -> Iterator[None]:
    """Turn what the Hugging Face libraries raise for ``name`` into one message.

    Args:
        option: the option that named it.
        name: the Hub name or local folder.
        repository: "model" or "dataset", as ``hf download --repo-type`` has it.

    Raises:
        UsageError: the name is no local folder and the Hub has it not, or cannot be reached.
    """
    try:
        yield
    except UsageError:
        raise
    except (OSError, ValueError, ImportError) as error:
        kind = "" if repository == "model" else f" --repo-type {repository}"
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(
            f"{option}={name!r} could not be loaded: {reason[0].rstrip('.')}. It is looked for as a local folder, then "
            "in the cache, then on the Hub. Without a network, use a local folder: where there is one, run "
            f"`hf download {name}{kind} --local-dir FOLDER`, copy FOLDER here and pass --{option} FOLDER."
        ) from error
