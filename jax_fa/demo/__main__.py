"""``python -m jax_fa.demo``: see ``program.py``."""

import sys

from jax_fa.demo.program import main

if __name__ == "__main__":
    sys.exit(main())
