"""Entry point that torch calls at the end of ``import torch``; see ``attn_plugins.autoload``.

This file lies in site-packages itself, also after an editable install, and never raises: torch turns an exception
in an entry point into a failure of ``import torch``.
"""

import os


def activate():
    """Install the toolkit hooks of ``attn_plugins``, or warn in one line where the package cannot be imported."""
    if os.environ.get("ATTN_PLUGINS_AUTOLOAD", "1") == "0":
        return
    try:
        from attn_plugins.autoload import activate as install_hooks

        install_hooks()
    except Exception as error:
        import logging

        logging.getLogger("attn_plugins").warning(
            "attn_plugins is installed but cannot be imported (%s: %s). If its checkout was moved or deleted, "
            "reinstall it, or remove it with `pip uninstall attn-plugins`; ATTN_PLUGINS_AUTOLOAD=0 silences this.",
            type(error).__name__,
            error,
        )
