"""Where the scripts are. They import each other by bare names, as programs do."""

from pathlib import Path
from typing import Final

SCRIPTS: Final = Path(__file__).resolve().parent.parent / "scripts"
