"""``python -m jax_fa.aot``: see ``compiler.py``."""

import sys

from jax_fa.aot.compiler import main

if __name__ == "__main__":
    sys.exit(main())
