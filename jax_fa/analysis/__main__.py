"""``python -m jax_fa.analysis``: see ``listing.py``."""

import sys

from jax_fa.analysis.listing import main

if __name__ == "__main__":
    sys.exit(main())
