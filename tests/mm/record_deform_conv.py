"""Record compiled mmcv's gradients of offsets.

::

    make env-peers
    .venv/bin/python -m tests.mm.record_deform_conv
"""

from __future__ import annotations

import sys

import numpy as np
from mmcv.ops import deform_conv2d, modulated_deform_conv2d

from tests.mm.mmcv_deform_conv import RECORDED, RECORDED_CASES, case_name, offset_gradient
from tools.bench.compiled_mmcv import NOT_COMPILED, is_compiled


def main() -> int:
    if not is_compiled():
        print(f"record_deform_conv: {NOT_COMPILED}", file=sys.stderr)
        return 1
    gradients = {
        case_name(*case): offset_gradient(deform_conv2d, modulated_deform_conv2d, case).numpy().astype(np.float32)
        for case in RECORDED_CASES
    }
    RECORDED.parent.mkdir(exist_ok=True)
    np.savez_compressed(RECORDED, **gradients)
    print(f"{len(gradients)} arrays, {RECORDED.stat().st_size} bytes: {RECORDED.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
