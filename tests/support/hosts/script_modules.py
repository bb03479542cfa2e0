"""The names of the scripts' modules."""

from pathlib import Path
from typing import Final

SCRIPTS: Final = Path(__file__).resolve().parents[3] / "scripts"
