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


RECORDS = Path(__file__).parent / "records"
"""One JSON file for each run of a benchmark; never changed afterwards."""


def record_path(kind: str) -> Path:
    """Where a new record of ``kind`` goes; names of one kind sort by date."""
    return RECORDS / f"{kind}-{datetime.now(UTC):%Y%m%dT%H%M%S}.json"
