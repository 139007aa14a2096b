"""What every record of a measurement says about where it was made."""

import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any


def environment() -> dict[str, Any]:
    """Commit, date, versions and machine."""
    folder = Path(__file__).parent
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=folder, capture_output=True, text=True)
    return {
        "commit": commit.stdout.strip(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")},
        "machine": f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}",
    }
