#!/usr/bin/env python3
"""Convert a model to EXL3: `convert.py -i MODEL -o OUTPUT -w WORK -b BITS`; see --help."""

import sys

from exl3.conversion.convert_model import run

if __name__ == "__main__":
    sys.exit(run())
