"""Offer this package's operators as ``mmcv._ext`` before anything here imports ``mmcv.ops``.

torch before 2.5 calls no entry point; importing ``attn_plugins.mmcv``, as configs do, is then early enough.
"""

from ..autoload import stand_in_for_extensions

stand_in_for_extensions()
