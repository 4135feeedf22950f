"""``python -m autop_ac``: the same as the command ``autop-ac``."""

import sys

from .cli import main

sys.exit(main())
